# Task N of the array takes line N, from 0: KEY=VALUE, several with spaces between.
variants=(
@{variants}
)
for change in ${variants[$SLURM_ARRAY_TASK_ID]}; do settings+=(--set "$change"); done
settings+=(--set "run.title=@{title}-$SLURM_ARRAY_TASK_ID" --set "run.dir=@{run_dir}-$SLURM_ARRAY_TASK_ID")
