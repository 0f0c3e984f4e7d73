"""The number formats that a deck names, as torch calls them."""

from __future__ import annotations

from types import MappingProxyType

import torch

DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})
