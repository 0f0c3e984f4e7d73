"""Benchmarks of hpctrain, and the programs that they are compared with."""
