"""Transports, which run the calls of a Group: MPI, memory of a node, NCCL, and combinations of these."""
