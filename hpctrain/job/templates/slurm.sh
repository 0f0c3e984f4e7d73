@{head}
#SBATCH --account=@{account}
#SBATCH --partition=@{partition}
#SBATCH --job-name=@{name}
#SBATCH --nodes=@{nodes}
@{tasks}
#SBATCH --cpus-per-task=@{cores_per_rank}
@{gpus}
@{memory}
#SBATCH --time=@{time}
@{array}
#SBATCH --output=@{output}
#SBATCH --open-mode=append
#SBATCH --requeue
@{no_kill}
@{signal}
@{directives}

@{modules}
hpctrain=(@{program})
if [ -n "${HPCTRAIN:-}" ]; then read -ra hpctrain <<<"$HPCTRAIN"; fi
@{mpirun}
deck=@{deck}
settings=(@{settings})
@{sweep}
ranks_per_node=@{ranks_per_node}
@{layout_note}
fitting_nodes=(@{fitting})

nodes=0
for count in "${fitting_nodes[@]}"; do
    if [ "$count" -le "$SLURM_JOB_NUM_NODES" ]; then nodes=$count; fi
done
if [ "$nodes" -eq 0 ]; then
    echo "the layout requires ${fitting_nodes[0]} nodes, but the job has $SLURM_JOB_NUM_NODES" >&2
    exit 2
fi

export OMP_NUM_THREADS=@{threads}
@{environment}
# The run stops before the job's end, which older versions of Slurm report only through squeue.
if [ -z "${SLURM_JOB_END_TIME:-}" ]; then
    end=$(squeue --noheader --job "$SLURM_JOB_ID" --format %e)
    end=${end:+$(date -d "$end" +%s)}
    if [ -n "$end" ]; then export SLURM_JOB_END_TIME=$end; fi
fi

@{launch}

@{end}
