"""Checks for silent faults that an engine attaches to a run: of matrix products, and of replicas.

`matmul_audit.py` checks products by random projections, off by default. `audit_kernels.py` computes these, by
torch or by the library of `audit.c`. `replica_check.py` compares the parameters that several ranks hold at
the start of a run. Checks of messages are in `audit/`.
"""
