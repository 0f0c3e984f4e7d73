# Slurm's default barrier of PMIx, a tree, is none on fewer nodes than TreeWidth. Then a rank can leave MPI_Init before
# those of other nodes are ready, and its first message makes one of them crash.
export SLURM_PMIX_FENCE=ring