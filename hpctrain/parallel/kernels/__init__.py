"""Kernels of CPUs: how they are compiled, chosen and measured."""
