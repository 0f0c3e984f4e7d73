#!/bin/bash
# Trains inputs/quickstart.toml on 2 nodes with 2 ranks each; goes on where an earlier job stopped.
# Edit account and partition below, then submit it from the folder that the deck's paths start from:
#   flux batch jobs/flux.sh
# Not run yet: no such system was there where this was written. Its syntax alone was checked.
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

# Load here the modules that hpctrain was installed with, such as: module load gcc openmpi hdf5
hpctrain=(.venv/bin/hpctrain)
if [ -n "${HPCTRAIN:-}" ]; then read -ra hpctrain <<<"$HPCTRAIN"; fi
deck=inputs/quickstart.toml
# The run knows its time, less a minute for starting, and stops before that.
settings=(--set batch.micro_size=4 --set run.time_limit=3540)
nodes=2
# On 2 nodes: pipeline 1 x data 4 x context 1 x tensor 1.
ranks_per_node=2

export OMP_NUM_THREADS=1

# Flux itself starts the ranks and sends them the signal. (-o pmi=pmix, where flux-pmix is installed and MPI wants it.)
flux run --nodes="$nodes" --ntasks=$((nodes * ranks_per_node)) --cores-per-task=1 \
    -o cpu-affinity=per-task --time-limit=3570s --signal=USR1@120s \
    "${hpctrain[@]}" run "$deck" --resume "${settings[@]}"
code=$?

# 75: stopped in good order, to be gone on with. 0 is done; 2, 3, 126 and 127 are for somebody to look at.
# All else is a fault or a lost node; a sixth one in a row is the last.
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
        echo "exit code $code, and as bad before (see $faults): not started again" >&2
        exit "$code"
    fi
    ;;
esac
echo "exit code $code: submitted again"
flux --parent batch jobs/flux.sh
exit "$code"
