@{head}
#PBS -A @{account}
#PBS -q @{partition}
#PBS -N @{name}
#PBS -l select=@{nodes}:ncpus=@{cores}:mpiprocs=@{ranks_per_node}:ompthreads=@{threads}@{gpus}@{memory}
#PBS -l place=scatter
#PBS -l walltime=@{time}
#PBS -j oe
#PBS -r y
@{directives}

cd "$PBS_O_WORKDIR" || exit 3
@{modules}
hpctrain=(@{program})
if [ -n "${HPCTRAIN:-}" ]; then read -ra hpctrain <<<"$HPCTRAIN"; fi
read -ra mpirun <<<"${MPIRUN:-mpirun} --hostfile $PBS_NODEFILE"
deck=@{deck}
# PBS sends no warning before the end. The run has its own time limit, a minute less for starting.
settings=(@{settings} --set run.time_limit=@{run_seconds})
nodes=@{nodes}
@{layout_note}
ranks_per_node=@{ranks_per_node}

export OMP_NUM_THREADS=@{threads}
@{environment}

@{launch}

@{end}
