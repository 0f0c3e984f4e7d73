"""Attention of one rank or of several.

All functions take queries, keys and values [s, b, heads, d] and return [s, b, heads, d]; keys and values may
have fewer heads. `LayerFunctions.attend` (kernels/layer_functions.py) computes complete sequences on one
rank, by torch's kernels or by compiled ones. The others are built on the attention of one block:

| module | computes |
|---|---|
| `block.py` | one block of queries over one block of keys, with its log-sum-exp |
| `packed.py` | documents that are packed in a sequence, each as one block |
| `ring.py` | pieces of sequences over the context axis: keys and values travel around a ring |
| `all_to_all.py` | pieces of sequences over the context axis: heads are exchanged for pieces |

Attention to keys and values in pages, for generation, is in `paged.py` beside this package.
"""
