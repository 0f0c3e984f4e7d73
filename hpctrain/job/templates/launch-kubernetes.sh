# A pod that is evicted receives TERM and has some time left: the run writes a checkpoint and stops.
trap 'signalled=1; kill -s USR2 "$launcher"' TERM
mpirun -n @{ranks} --map-by ppr:@{ranks_per_node}:node --bind-to none \
    -x OMP_NUM_THREADS@{exported} @{program} run @{deck} --resume @{settings} &
launcher=$!
signalled=1
while [ "$signalled" -eq 1 ]; do # a signal ends wait, but not mpirun
    signalled=0
    wait "$launcher"
    code=$?
done
