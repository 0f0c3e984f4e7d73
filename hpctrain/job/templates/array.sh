# Task N of the array runs line N, counted from 0.
run_dir=
case $SLURM_ARRAY_TASK_ID in
@{cases}
*)
    echo "this sweep has no run $SLURM_ARRAY_TASK_ID" >&2
    exit 2
    ;;
esac
echo "run $SLURM_ARRAY_TASK_ID: $run_dir"
