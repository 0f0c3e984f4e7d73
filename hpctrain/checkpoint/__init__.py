"""Checkpoints: one HDF5 file of whole global tensors, written and read in pieces by any layout."""
