"""Optimizers that update whole matrices, and how these are distributed among ranks."""
