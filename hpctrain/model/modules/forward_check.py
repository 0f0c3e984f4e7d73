"""Check that a model of `transformers` can compute, before its weights are read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from hpctrain.errors import UserCodeError
from hpctrain.model.modules.config_problems import transformers_errors
from hpctrain.model.modules.module_architecture import find_blocks
from hpctrain.model.modules.pipeline.call_order import trace_call_order
from hpctrain.model.modules.pipeline.meta_products import grouped_products

_MOST_TOKENS = 16
"""Largest number of tokens of the pass."""

_SHAPES = re.compile(r"\b(shapes?|sizes?|dimensions?|out of range)\b")
"""Expression that finds messages about shapes."""


def require_forward(
    module: nn.Module, pattern: str | None, sequence: int | None, config: Mapping[str, Any], where: str
) -> None:
    """Run a forward pass of a model on "meta".

    Only errors about shapes count. Others may come from tensors without values.

    Args:
        module: The model, on "meta". Its forward methods are replaced, so do not use it afterwards.
        pattern: Pattern of the names of its blocks; None if it has none.
        sequence: Number of tokens of its longest sequence; None if it has no limit.
        config: Content of its config.json.
        where: Name of the file, for messages.

    Raises:
        UserCodeError: The pass fails because of shapes. The message names keys that the failing line of code
            reads.
    """
    tokens = torch.ones(1, min(sequence or _MOST_TOKENS, _MOST_TOKENS), dtype=torch.int64)
    try:
        with grouped_products(), transformers_errors(f"{where}: transformers cannot run the model", config):
            trace_call_order(module, partial(module, input_ids=tokens), find_blocks(module, pattern))
    except UserCodeError as error:
        if _is_about_shapes(error):
            raise
    except Exception:  # noqa: BLE001  (the trace itself failed, which says nothing about the model)
        return


def _is_about_shapes(error: UserCodeError) -> bool:
    """Return True if an error says that shapes do not fit, and nothing about tensors without values."""
    text = error.problems[0].partition(": ")[2]
    return _SHAPES.search(text) is not None and "meta" not in text
