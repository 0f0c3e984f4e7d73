"""Check of matrix products by random projections, and the kernels that compute it."""
