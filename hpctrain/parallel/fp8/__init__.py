"""Matrix products in 8 bits: formats, scales, recipes, and the products of a layer.

| module | holds |
|---|---|
| `formats.py` | the two formats, and scales as powers of two |
| `quantize.py` | blocks that share a scale, and matrices in 8 bits |
| `matmul_choice.py` | the class of products of a layer |
| `recipes.py` | which elements of each operand share a scale, and which matrices are excluded |
| `multiply.py` | the product of two quantized matrices, by the device or emulated |
| `quantized_matmul.py` | the three products of a layer with scales of current maxima |
| `delayed_matmul.py` | the same with scales of earlier steps, and their state in checkpoints |
| `quantization_loss.py` | metrics of `precision.fp8_watch` |

A maximum covers all ranks that hold parts of a tensor, so scales do not depend on the layout. The transposed
matrix of a product is quantized from high precision, never from 8 bits. Routed experts stay in bf16: their
tokens come from several ranks, so a scale would depend on the layout.

A new recipe belongs in `recipes.py`, and its name in `precision.fp8` of `deck/sections/precision.py`.
"""
