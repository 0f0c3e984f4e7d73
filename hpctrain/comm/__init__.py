"""Ranks, the mesh that they form, and the groups through which they exchange tensors."""
