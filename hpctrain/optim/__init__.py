"""Optimizer, learning rate, clipping and loss scale."""
