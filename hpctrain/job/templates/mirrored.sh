# checkpoint.mirror: if a node is lost, the job stays (--no-kill), and the run resumes at once on the remaining
# nodes from the copies of its state in their memory.
faults=@{faults}
while true; do
    # If this script's own node is lost, a process on another node requeues the job.
    others=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | grep --invert-match --line-regexp "$SLURMD_NODENAME")
    guard=
    if [ -n "$others" ]; then
        # shellcheck disable=SC2016 # for the shell of the other node
        srun --overlap --nodes=1 --ntasks=1 --nodelist="${others%%$'\n'*}" --cpus-per-task=1 --mem=0 --output=none bash -c '
            trap "" USR1 USR2
            while sleep 10; do
                here=$(squeue --noheader --job "$SLURM_JOB_ID" --format %N) || continue
                if ! scontrol show hostnames "$here" | grep --quiet --line-regexp "$0"; then
                    scontrol requeue "$SLURM_JOB_ID" && break
                fi
            done' "$SLURMD_NODENAME" &
        guard=$!
    fi
@{launch}
    if [ -n "$guard" ]; then kill "$guard" && wait "$guard"; fi
    case $code in 0 | 2 | 3 | 75 | 126 | 127) break ;; esac
    echo "exit code $code on $(hostname), $(date)" >>"$faults"
    if [ "$(wc -l <"$faults")" -gt 5 ]; then break; fi
    # Slurm removes a lost node after a while (SlurmdTimeout). Until then, some nodes of the job do not answer.
    for _ in {1..60}; do
        left=$(squeue --noheader --job "$SLURM_JOB_ID" --format %D)
        SLURM_JOB_NODELIST=$(squeue --noheader --job "$SLURM_JOB_ID" --format %N)
        if timeout 30 srun --overlap --nodes="$left" --ntasks="$left" --ntasks-per-node=1 true; then break; fi
        sleep 5
    done
    nodes=0
    for count in "${fitting_nodes[@]}"; do
        if [ "$count" -le "$left" ]; then nodes=$count; fi
    done
    if [ "$nodes" -eq 0 ]; then break; fi
    # mpirun finds the nodes by these variables.
    export SLURM_JOB_NODELIST SLURM_NODELIST=$SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES=$left SLURM_NNODES=$left
    export SLURM_TASKS_PER_NODE="$ranks_per_node(x$left)"
    export SLURM_JOB_CPUS_PER_NODE="${SLURM_JOB_CPUS_PER_NODE%%(*}(x$left)"
    echo "exit code $code: resumes at once on $SLURM_JOB_NODELIST"
done
