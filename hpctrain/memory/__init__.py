"""Activations, cache and other tensors: recomputation, offload, and accounts of bytes."""
