"""Checks that an engine attaches to a run by the section [stability], and fingerprints of tensors.

`matmul_audit.py` checks products by random projections, off by default. `audit_kernels.py` computes these, by
torch or by the library of `audit.c`. `replica_check.py` compares the parameters that several ranks hold at
the start of a run. `spikes.py` finds steps whose loss or gradient norm is far above those of recent steps.
`fingerprint.py` identifies a tensor on any layout, by which runs and ranks are compared. Checks of messages
are in `audit/`.
"""
