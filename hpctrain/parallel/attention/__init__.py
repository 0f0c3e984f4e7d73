"""Attention of one rank or of several: one interface, and the methods behind it."""
