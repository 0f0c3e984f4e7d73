# Slurm itself starts the ranks (srun --mpi=list shows how it can), and sends them its signal.
# Ranks that leave with an error leave together; where one is lost, the others are ended after 30 s.
srun --mpi=@{mpi} --nodes="$nodes" --ntasks=$((nodes * ranks_per_node)) --ntasks-per-node="$ranks_per_node" \
    --cpus-per-task=@{cores_per_rank} --cpu-bind=cores@{gpu_bind} --distribution=block:block \
    --kill-on-bad-exit=0 --wait=30 "${hpctrain[@]}" run "$deck" --resume "${settings[@]}"
code=$?
