"""Checkpoints: HDF5 files of global tensors that ranks of any layout write and read piece by piece."""
