"""Mixtures of experts: feed-forward layer, router, and load of experts."""
