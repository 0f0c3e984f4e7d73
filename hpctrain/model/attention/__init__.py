"""Attention layers of a block, around the core of attention in `parallel/attention/`.

`self_attention.py` has the layer of most families, and `latent_attention.py` that of DeepSeek.
`query_key_norm.py`, `query_key_value_clip.py` and `rotary.py` have what may lie between projection and core.
"""
