@{head}
#BSUB -P @{account}
#BSUB -q @{partition}
#BSUB -J @{name}
#BSUB -n @{tasks}
#BSUB -R "span[ptile=@{ranks_per_node}] affinity[core(@{cores_per_rank})]"
@{gpus}
@{memory}
#BSUB -W @{hours_minutes}
#BSUB -o @{name}-%J.out
#BSUB -r
#BSUB -Q "75"
#BSUB -wa USR1 -wt @{warning_minutes}
@{directives}

@{modules}
hpctrain=(@{program})
if [ -n "${HPCTRAIN:-}" ]; then read -ra hpctrain <<<"$HPCTRAIN"; fi
read -ra mpirun <<<"${MPIRUN:-mpirun}"
deck=@{deck}
# The run has its own time limit, a minute less for starting, and stops before it.
settings=(@{settings} --set run.time_limit=@{run_seconds})
ranks_per_node=@{ranks_per_node}
@{layout_note}
fitting_nodes=(@{fitting})

nodes=0
for count in "${fitting_nodes[@]}"; do
    if [ $((count * ranks_per_node)) -le "$LSB_DJOB_NUMPROC" ]; then nodes=$count; fi
done
if [ "$nodes" -eq 0 ]; then
    echo "the layout requires ${fitting_nodes[0]} nodes, but the job has $LSB_DJOB_NUMPROC slots" >&2
    exit 2
fi

export OMP_NUM_THREADS=@{threads}
@{environment}

@{launch}

@{end}
