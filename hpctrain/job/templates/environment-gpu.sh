# NCCL detects the network. If it chooses a wrong one, name interfaces and adapters:
#   export NCCL_SOCKET_IFNAME=ib0 NCCL_IB_HCA=mlx5
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# Let NCCL's helper threads run on the cores next to their GPU, wherever the rank is bound.
export NCCL_IGNORE_CPU_AFFINITY=1
