"""Choices at the start of a run: kernels, functions, recomputation and memory outside the device."""
