"""Layers split over mesh axes: their communication is part of autograd."""
