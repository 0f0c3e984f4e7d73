"""Programs that the benchmarks are compared with."""
