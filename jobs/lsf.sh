#!/bin/bash
# Trains inputs/quickstart.toml on 1 to 2 nodes with 2 ranks each; resumes where an earlier job stopped.
# Edit account and partition below, then submit it from the folder that the paths in the deck are relative to:
#   bsub < jobs/lsf.sh
# Never run on such a system: only the syntax of this script was checked.
# Written by: hpctrain job inputs/quickstart.toml --scheduler lsf --nodes 1-2 --ranks-per-node 2 --set batch.micro_size=4 --output jobs/lsf.sh
#BSUB -P ACCOUNT
#BSUB -q PARTITION
#BSUB -J quickstart
#BSUB -n 2,4
#BSUB -R "span[ptile=2] affinity[core(1)]"
#BSUB -W 01:00
#BSUB -o quickstart-%J.out
#BSUB -r
#BSUB -Q "75"
#BSUB -wa USR1 -wt 2

# Load the modules here that hpctrain was installed with, such as: module load gcc openmpi hdf5
hpctrain=(.venv/bin/hpctrain)
if [ -n "${HPCTRAIN:-}" ]; then read -ra hpctrain <<<"$HPCTRAIN"; fi
read -ra mpirun <<<"${MPIRUN:-mpirun}"
deck=inputs/quickstart.toml
# The run has its own time limit, a minute less for starting, and stops before it.
settings=(--set batch.micro_size=4 --set run.time_limit=3540)
ranks_per_node=2
# On 2 nodes: pipeline 1 x data 4 x context 1 x tensor 1. Numbers of nodes that the deck's layout fits:
fitting_nodes=(1 2)

nodes=0
for count in "${fitting_nodes[@]}"; do
    if [ $((count * ranks_per_node)) -le "$LSB_DJOB_NUMPROC" ]; then nodes=$count; fi
done
if [ "$nodes" -eq 0 ]; then
    echo "the layout requires ${fitting_nodes[0]} nodes, but the job has $LSB_DJOB_NUMPROC slots" >&2
    exit 2
fi

export OMP_NUM_THREADS=1

# The scheduler sends signals to this script, which sends them to mpirun. That forwards USR1 and USR2 to all ranks.
# (The flags are Open MPI's. MPICH and Intel MPI: mpiexec -ppn "$ranks_per_node" -bind-to core:1 -n ...)
trap 'signalled=1; kill -s USR1 "$launcher"' USR1
trap 'signalled=1; kill -s USR2 "$launcher"' USR2
"${mpirun[@]}" -n $((nodes * ranks_per_node)) --map-by "ppr:$ranks_per_node:node:PE=1" --bind-to core \
    -x OMP_NUM_THREADS "${hpctrain[@]}" run "$deck" --resume "${settings[@]}" &
launcher=$!
signalled=1
while [ "$signalled" -eq 1 ]; do # a signal ends wait, but not mpirun
    signalled=0
    wait "$launcher"
    code=$?
done

# Exit codes: 0 is done, 75 is stopped and can be resumed; 2, 3, 126 and 127 are errors that the user must correct.
# Any other code is a fault or a lost node. The job starts again after up to five of them in a row.
faults=quickstart.faults
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
if [ "$code" -ne 75 ]; then echo "exit code $code: submitted again"; bsub <jobs/lsf.sh; fi
exit "$code"
