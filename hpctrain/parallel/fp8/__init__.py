"""Matrices in 8 bits an element: formats, scales, recipes, and the product of two of them.

Data passes through these modules: `recipes` (ScalingRecipe: which elements share a scale, and from which
maxima it comes), `quantize` (ScaleBlocks, QuantizedTensor), `quantized_matmul` (QuantizedMatmul and
DelayedMatmul: a product with its two gradients), and `multiply` (`torch._scaled_mm`, or the same numbers in
bf16 or fp32). `history` keeps maxima of earlier steps for the recipe "delayed" and stores them in
checkpoints. `watched` makes the metrics of `precision.fp8_watch`.

A maximum covers all ranks that hold parts of a tensor, so scales do not depend on the layout. The transposed
matrix of a product is quantized from high precision, never from 8 bits. Routed experts stay in bf16: their
tokens come from several ranks, so a scale would depend on the layout.

A new recipe belongs in `recipes`, and its name in `precision.fp8` of `deck/sections/precision.py`.
"""
