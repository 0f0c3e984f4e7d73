"""Measurement of the rates of a machine, by all ranks at the same time."""
