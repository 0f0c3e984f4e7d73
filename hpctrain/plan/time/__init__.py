"""Prediction of the time of a step on a machine, by cause."""
