# Slurm itself starts the ranks, over PMIx (srun --mpi=list tells what else there is), and sends them its signal.
srun --mpi=pmix --nodes="$nodes" --ntasks=$((nodes * ranks_per_node)) --ntasks-per-node="$ranks_per_node" \
    --cpus-per-task=@{threads} --cpu-bind=cores@{gpu_bind} --distribution=block:block --kill-on-bad-exit=1 \
    "${hpctrain[@]}" run "$deck" --resume "${settings[@]}"
code=$?
