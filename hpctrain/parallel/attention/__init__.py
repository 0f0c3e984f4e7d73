"""Causal attention of one rank or of several, which all have the interface `AttentionCore`.

A layer calls `attention_core` once to get its attention function. On one rank this is `LayerFunctions.attend`
(kernels/functions/layer_functions.py), by torch's kernels or by compiled ones. All functions receive
`AttentionInputs` (kernels/attention_inputs.py) and an `AttentionRule`. A rule with a window or a soft cap is
computed by tiles, as kernels/attention_tiles.py explains, or by compiled functions. The other modules are:

| module | computes |
|---|---|
| `core.py` | the interface, and which of the following a layer uses |
| `ring.py` | pieces of sequences over the context axis: keys and values travel around a ring |
| `all_to_all.py` | pieces of sequences over the context axis: heads are exchanged for pieces |
| `paged.py` | new tokens over keys and values in pages, for generation |

To add a rule by which positions attend to others, such as a window, an engineer changes these places:

| place | has |
|---|---|
| `ModelShape.window` (model/shape.py) | its numbers for each block, from the deck's [model] |
| `BlockAttention` (model/attention/self_attention.py) | the AttentionRule of a layer, from the shape |
| `AttentionRule` in kernels/attention_tiles.py | the rule, and the tiles that it keeps |
| blockwise_attention.py and functions/functions.c in kernels/ | attention under the rule, by torch and in C |
| `ring.py`, `paged.py` | the rule over pieces of sequences, and over pages in generation |
| costs/layer_flops.py, costs/layer_bytes/ | FLOPs and bytes under the rule |
"""
