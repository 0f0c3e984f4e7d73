@{head}
# flux: --bank=@{account}
# flux: --queue=@{partition}
# flux: --job-name=@{name}
# flux: --nodes=@{nodes}
# flux: --nslots=@{ranks}
# flux: --cores-per-slot=@{cores_per_rank}
@{gpus}
# flux: --exclusive
# flux: --time-limit=@{seconds}s
# flux: --output=@{name}-{{id}}.out
@{directives}

@{modules}
hpctrain=(@{program})
if [ -n "${HPCTRAIN:-}" ]; then read -ra hpctrain <<<"$HPCTRAIN"; fi
deck=@{deck}
# The run has its own time limit, a minute less for starting, and stops before it.
settings=(@{settings} --set run.time_limit=@{run_seconds})
nodes=@{nodes}
@{layout_note}
ranks_per_node=@{ranks_per_node}

export OMP_NUM_THREADS=@{threads}
@{environment}

# Flux starts the ranks and sends them the signal. (Add -o pmi=pmix if MPI requires it and flux-pmix is installed.)
flux run --nodes="$nodes" --ntasks=$((nodes * ranks_per_node)) --cores-per-task=@{cores_per_rank}@{gpus_per_task} \
    -o cpu-affinity=per-task --time-limit=@{flux_seconds}s --signal=USR1@@{warning}s \
    "${hpctrain[@]}" run "$deck" --resume "${settings[@]}"
code=$?

@{end}
