"""What backward needs kept: recomputation, offload, scratch files, and the ledger of the bytes held."""
