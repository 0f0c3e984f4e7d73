"""hpctrain: transformer language models trained over MPI ranks."""

__version__ = "0.1.0"
