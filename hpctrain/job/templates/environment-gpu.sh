# NCCL finds the network itself; where it takes a wrong one, name interfaces and adapters:
#   export NCCL_SOCKET_IFNAME=ib0 NCCL_IB_HCA=mlx5
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# Its helper threads run on the cores next to their GPU, wherever the rank is bound.
export NCCL_IGNORE_CPU_AFFINITY=1
# Kernels start in the order they were queued in: communication is not kept waiting behind what comes after it.
export CUDA_DEVICE_MAX_CONNECTIONS=1
