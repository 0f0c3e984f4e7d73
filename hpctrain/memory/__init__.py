"""Recomputation of activations, and storage of tensors in fewer bits, in host memory or in files."""
