# Task N of the array uses line N, counted from 0: KEY=VALUE, several separated by spaces.
variants=(
@{variants}
)
read -ra changes <<<"${variants[$SLURM_ARRAY_TASK_ID]}"
for change in "${changes[@]}"; do settings+=(--set "$change"); done
settings+=(--set @{title} --set @{run_dir})
