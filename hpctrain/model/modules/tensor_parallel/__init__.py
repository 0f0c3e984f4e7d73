"""Tensor parallelism of a user's module: plans, and the parallel layers that replace its own."""
