"""Benchmarks, and the peers that they run against."""
