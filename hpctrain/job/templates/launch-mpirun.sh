# The scheduler sends signals to this script, which sends them to mpirun. That forwards USR1 and USR2 to all ranks.
# (The flags are Open MPI's. MPICH and Intel MPI: mpiexec -ppn "$ranks_per_node" -bind-to core:@{cores_per_rank} -n ...)
trap 'signalled=1; kill -s USR1 "$launcher"' USR1
trap 'signalled=1; kill -s USR2 "$launcher"' USR2
"${mpirun[@]}" -n $((nodes * ranks_per_node)) --map-by "ppr:$ranks_per_node:node:PE=@{cores_per_rank}" --bind-to core \
    -x OMP_NUM_THREADS@{exported} "${hpctrain[@]}" run "$deck" --resume "${settings[@]}" &
launcher=$!
signalled=1
while [ "$signalled" -eq 1 ]; do # a signal ends wait, but not mpirun
    signalled=0
    wait "$launcher"
    code=$?
done
