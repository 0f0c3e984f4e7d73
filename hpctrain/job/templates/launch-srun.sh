@{fence}
# Slurm starts the ranks (srun --mpi=list shows the methods) and sends them the signal.
# After an error all ranks end together. If one rank is lost, the others are killed after 30 s.
srun --mpi=@{mpi} --nodes="$nodes" --ntasks=$((nodes * ranks_per_node)) --ntasks-per-node="$ranks_per_node" \
    --cpus-per-task=@{cores_per_rank} --cpu-bind=cores@{gpu_bind} --distribution=block:block \
    --kill-on-bad-exit=0 --wait=30 "${hpctrain[@]}" run "$deck" --resume "${settings[@]}"
code=$?
