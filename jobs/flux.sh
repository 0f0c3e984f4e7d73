#!/bin/bash
# Trains inputs/quickstart.toml on 2 nodes with 2 ranks each; resumes where an earlier job stopped.
# Edit account and partition below, then submit it from the folder that the paths in the deck are relative to:
#   flux batch jobs/flux.sh
# Never run on such a system: only the syntax of this script was checked.
# Written by: hpctrain job inputs/quickstart.toml --scheduler flux --nodes 2 --ranks-per-node 2 --set batch.micro_size=4 --output jobs/flux.sh
# flux: --bank=ACCOUNT
# flux: --queue=PARTITION
# flux: --job-name=quickstart
# flux: --nodes=2
# flux: --nslots=4
# flux: --cores-per-slot=1
# flux: --exclusive
# flux: --time-limit=3600s
# flux: --output=quickstart-{{id}}.out

# Load the modules here that hpctrain was installed with, such as: module load gcc openmpi hdf5
hpctrain=(.venv/bin/hpctrain)
if [ -n "${HPCTRAIN:-}" ]; then read -ra hpctrain <<<"$HPCTRAIN"; fi
deck=inputs/quickstart.toml
# The run has its own time limit, a minute less for starting, and stops before it.
settings=(--set batch.micro_size=4 --set run.time_limit=3540)
nodes=2
# On 2 nodes: pipeline 1 x data 4 x context 1 x tensor 1.
ranks_per_node=2

export OMP_NUM_THREADS=1

# Flux starts the ranks and sends them the signal. (Add -o pmi=pmix if MPI requires it and flux-pmix is installed.)
flux run --nodes="$nodes" --ntasks=$((nodes * ranks_per_node)) --cores-per-task=1 \
    -o cpu-affinity=per-task --time-limit=3570s --signal=USR1@120s \
    "${hpctrain[@]}" run "$deck" --resume "${settings[@]}"
code=$?

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
echo "exit code $code: submitted again"
flux --parent batch jobs/flux.sh
exit "$code"
