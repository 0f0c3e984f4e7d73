"""Checks of the programmes of all ranks: calls that do not match, and ranks that wait for each other."""
