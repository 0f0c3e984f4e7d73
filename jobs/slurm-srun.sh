#!/bin/bash
# Trains inputs/quickstart.toml on 1 to 2 nodes with 2 ranks each; resumes where an earlier job stopped.
# Edit account and partition below, then submit it from the folder that the paths in the deck are relative to:
#   sbatch jobs/slurm-srun.sh
# Written by: hpctrain job inputs/quickstart.toml --launcher srun --nodes 1-2 --ranks-per-node 2 --set batch.micro_size=4 --output jobs/slurm-srun.sh
#SBATCH --account=ACCOUNT
#SBATCH --partition=PARTITION
#SBATCH --job-name=quickstart
#SBATCH --nodes=1-2
# Not --ntasks-per-node: a requeued job would wait for the number of nodes that it had before.
#SBATCH --mincpus=2
#SBATCH --threads-per-core=1
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@120

# Load the modules here that hpctrain was installed with, such as: module load gcc openmpi hdf5
hpctrain=(.venv/bin/hpctrain)
if [ -n "${HPCTRAIN:-}" ]; then read -ra hpctrain <<<"$HPCTRAIN"; fi
deck=inputs/quickstart.toml
settings=(--set batch.micro_size=4)
ranks_per_node=2
# On 2 nodes: pipeline 1 x data 4 x context 1 x tensor 1. Numbers of nodes that the deck's layout fits:
fitting_nodes=(1 2)

nodes=0
for count in "${fitting_nodes[@]}"; do
    if [ "$count" -le "$SLURM_JOB_NUM_NODES" ]; then nodes=$count; fi
done
if [ "$nodes" -eq 0 ]; then
    echo "the layout requires ${fitting_nodes[0]} nodes, but the job has $SLURM_JOB_NUM_NODES" >&2
    exit 2
fi

export OMP_NUM_THREADS=1
# The run stops before the job's end, which older versions of Slurm report only through squeue.
if [ -z "${SLURM_JOB_END_TIME:-}" ]; then
    end=$(squeue --noheader --job "$SLURM_JOB_ID" --format %e)
    end=${end:+$(date -d "$end" +%s)}
    if [ -n "$end" ]; then export SLURM_JOB_END_TIME=$end; fi
fi

# Slurm's default barrier of PMIx, a tree, is none on fewer nodes than TreeWidth. Then a rank can leave MPI_Init before
# those of other nodes are ready, and its first message makes one of them crash.
export SLURM_PMIX_FENCE=ring
# Slurm starts the ranks (srun --mpi=list shows the methods) and sends them the signal.
# After an error all ranks end together. If one rank is lost, the others are killed after 30 s.
srun --mpi=pmix --nodes="$nodes" --ntasks=$((nodes * ranks_per_node)) --ntasks-per-node="$ranks_per_node" \
    --cpus-per-task=1 --cpu-bind=cores --distribution=block:block \
    --kill-on-bad-exit=0 --wait=30 "${hpctrain[@]}" run "$deck" --resume "${settings[@]}"
code=$?

# Exit codes: 0 is done, 75 is stopped and can be resumed; 2, 3, 126 and 127 are errors that the user must correct.
# Any other code is a fault or a lost node. The job starts again after up to five of them in a row.
faults="quickstart-$SLURM_JOB_ID.faults"
case $code in
75) rm -f "$faults" ;;
0 | 2 | 3 | 126 | 127)
    rm -f "$faults"
    exit "$code"
    ;;
*)
    echo "exit code $code on $(hostname), $(date)" >>"$faults"
    if [ "$(wc -l <"$faults")" -gt 5 ]; then
        echo "exit code $code, after earlier faults (see $faults): not started again" >&2
        exit "$code"
    fi
    ;;
esac
echo "exit code $code: queued again"
scontrol requeue "$SLURM_JOB_ID"
exit "$code"
