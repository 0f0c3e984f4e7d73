# Task N of the array takes line N, from 0.
run_dir=
case $SLURM_ARRAY_TASK_ID in
@{cases}
*)
    echo "there is no run $SLURM_ARRAY_TASK_ID in this sweep" >&2
    exit 2
    ;;
esac
echo "run $SLURM_ARRAY_TASK_ID: $run_dir"
