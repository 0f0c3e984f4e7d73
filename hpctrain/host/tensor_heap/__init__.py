"""Heap from which torch allocates the tensors of a CPU, instead of malloc."""
