# Not --ntasks-per-node: queued again, the job would wait for as many nodes as it once had.
#SBATCH --mincpus=@{cores}
#SBATCH --threads-per-core=1
