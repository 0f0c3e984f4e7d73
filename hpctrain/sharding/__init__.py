"""Flat buffers of parameters, gradients and optimizer state, and their synchronization."""
