#!/bin/bash
# @{summary}
# @{usage}
#   @{submit}
@{not_run}
# Written by: @{command}
#SBATCH --account=@{account}
#SBATCH --partition=@{partition}
#SBATCH --job-name=@{name}
#SBATCH --nodes=@{nodes}
#SBATCH --ntasks-per-node=@{ranks_per_node}
#SBATCH --cpus-per-task=@{threads}
@{gpus}
@{memory}
#SBATCH --time=@{time}
@{array}
#SBATCH --output=@{output}
#SBATCH --open-mode=append
#SBATCH --requeue
@{signal}

# Load here the modules that hpctrain was installed with, such as: module load gcc openmpi hdf5
read -ra hpctrain <<<"${HPCTRAIN:-@{program}}"
@{mpirun}
deck=@{deck}
settings=(@{settings})
@{sweep}
ranks_per_node=@{ranks_per_node}
@{layout_note}
fitting_nodes=(@{fitting})

nodes=0
for count in "${fitting_nodes[@]}"; do
    if [ "$count" -le "$SLURM_JOB_NUM_NODES" ]; then nodes=$count; fi
done
if [ "$nodes" -eq 0 ]; then
    echo "the layout needs ${fitting_nodes[0]} nodes, and the job has $SLURM_JOB_NUM_NODES" >&2
    exit 2
fi

export OMP_NUM_THREADS=@{threads}
@{environment}
# The run stops by itself before the job's end, which older versions of Slurm tell squeue alone.
if [ -z "${SLURM_JOB_END_TIME:-}" ]; then
    end=$(squeue --noheader --job "$SLURM_JOB_ID" --format %e)
    end=${end:+$(date -d "$end" +%s)}
    if [ -n "$end" ]; then export SLURM_JOB_END_TIME=$end; fi
fi

@{launch}

# 75: stopped in good order, to be gone on with. 0 is done; 2, 3, 126 and 127 are for somebody to look at.
# All else is a fault or a lost node, after which a job is started again five times at most.
restarts=${SLURM_RESTART_COUNT:-0}
case $code in
0 | 2 | 3 | 126 | 127) exit "$code" ;;
75) ;;
*) if [ "$restarts" -ge 5 ]; then
    echo "exit code $code after $restarts restarts: not started again" >&2
    exit "$code"
fi ;;
esac
echo "exit code $code: job $SLURM_JOB_ID is queued again"
scontrol requeue "$SLURM_JOB_ID"
exit "$code"
