"""Kernels: libraries for matrix products, blocks of attention, and functions that are compiled from C.

| module | holds |
|---|---|
| `matmul_kernels.py` | kernels for matrix products, and the table that says which one computes a product |
| `timing.py` | measurement of these kernels, by which a run chooses |
| `functions/` | functions of a block by torch, or by a library that is compiled from `functions.c` |
| `attention_inputs.py` | inputs of attention, and rotation of queries and keys |
| `attention_block.py` | attention of one block of queries over one block of keys, with its log-sum-exp |
| `attention_tiles.py` | tiles of queries and keys, by which windows, soft caps and sinks are computed |
| `blockwise_attention.py` | attention of complete sequences, or of documents packed in them, by blocks |
| `normalization.py` | LayerNorm and RMSNorm by torch, with a backward pass that keeps few tensors |
| `logits.py` | softmax statistics of logits, for losses |
| `choice_cache.py` | the cache file of measured kernels, by type of processor |
| `small_batch.py` | products of a few rows with the bits of large ones |
"""
