"""Functions of a block besides its matrix products: attention, norms, activations and softmax statistics.

On a CPU torch computes a gate, a rotation or an RMSNorm in several passes over memory, exponentials of GELU
slowly, and attention in blocks with small products. The functions that are compiled from `functions.c` read
their operands once and compute in fp32, so results agree up to the rounding of their format.

    LayerFunctions         torch's operations, and the interface
    └── CompiledFunctions  functions of the compiled library

| module | holds |
|---|---|
| `layer_functions.py` | the interface, and the functions by torch's operations |
| `compiled_functions.py` | the functions of the compiled library, with their backward passes |
| `compiled_attention.py` | its attention |
| `functions.c` | the C source of the library |
| `function_library.py` | the library as ctypes calls it, and its trial in another process |
| `agreement.py` | the comparison of a new library with torch |
"""
