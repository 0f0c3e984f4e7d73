"""Prediction of what a deck costs before it runs: memory, traffic and time."""
