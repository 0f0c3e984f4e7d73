"""Causal attention of one rank or of several, which all have the interface `AttentionCore`.

A layer asks `attention_core` once for what it computes with. On one rank it is `LayerFunctions.attend`
(kernels/layer_functions.py), by torch's kernels or by compiled ones. A ring computes by
`kernels/attention_block.py`. Windows, soft caps and sinks (`AttentionRule`) are computed by tiles, as
`kernels/attention_tiles.py` explains, or by compiled functions. The other modules are:

| module | computes |
|---|---|
| `core.py` | the interface, and which of the following a layer uses |
| `ring.py` | pieces of sequences over the context axis: keys and values travel around a ring |
| `all_to_all.py` | pieces of sequences over the context axis: heads are exchanged for pieces |
| `paged.py` | new tokens over keys and values in pages, for generation |
"""
