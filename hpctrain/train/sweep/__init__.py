"""Sweeps: many runs of a deck with other values of some keys."""
