# Not --ntasks-per-node: a requeued job would wait for the number of nodes that it had before.
#SBATCH --mincpus=@{cores}
#SBATCH --threads-per-core=1
