"""Ranks, the mesh they form, and the groups through which tensors travel."""
