"""Bytes of layers: what they save for the backward pass, and what they need meanwhile.

Layers do not know about plans. This package derives from a layer, and from the sizes of a micro-batch, how
many bytes it needs. `byte_functions.py` has one function for each kind of memory, dispatched by the class of
the layer. The other modules register implementations. For a new layer, register `saved_storages`, and the
other functions whose defaults are not right.

| layers | module |
|---|---|
| blocks, rotary tables of a model | `block_bytes.py` |
| attention and norms | `attention_bytes.py` |
| latent attention | `latent_bytes.py` |
| feed-forward | `feed_forward_bytes.py` |
| mixture of experts, router | `mixture_bytes.py` |
| embedding, output layers | `vocabulary_bytes.py` |
| linear layers, adapters | `linear_bytes.py` |
| matrix products and their kernels, 8-bit products | `matmul_bytes.py` |
| products that oneDNN has prepared on a CPU | `prepared_products.py` |
| layers of modules that users bring | `module_bytes.py` |

A user's module is a black box. `module_trace.py` runs a part of it on torch's device "meta" and records what
each layer saves and computes. `meta_device.py` makes "meta" behave like a CPU or GPU during that pass.
"""

from hpctrain.costs.layer_bytes import (  # noqa: F401  (they register implementations)
    attention_bytes,
    block_bytes,
    latent_bytes,
    module_bytes,
)
