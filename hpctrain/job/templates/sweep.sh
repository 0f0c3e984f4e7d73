# Task N of the array takes line N, from 0: KEY=VALUE, several with spaces between.
variants=(
@{variants}
)
read -ra changes <<<"${variants[$SLURM_ARRAY_TASK_ID]}"
for change in "${changes[@]}"; do settings+=(--set "$change"); done
settings+=(--set @{title} --set @{run_dir})
