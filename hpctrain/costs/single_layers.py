"""Ranges of single layers: measurements time one layer of each kind in place of the whole model."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.model.part import LayerKind, LayerRange


def single_layers(kinds: Sequence[LayerKind], with_block: bool = False) -> dict[LayerKind, LayerRange]:
    """Return a range of one layer for each kind: blocks, then embedding and output layer.

    Args:
        kinds: Kind of each layer of the model, from the embedding to the output layer.
        with_block: True if the embedding and the output layer need the block next to them in their range.
    """
    spans: dict[LayerKind, LayerRange] = {}
    first, *blocks, last = kinds
    for number, kind in enumerate(blocks):
        if not with_block or number or kind not in blocks[1:]:
            spans.setdefault(kind, LayerRange(number, number + 1, with_block and not number, False))
    if with_block:
        block_count = len(blocks)
        return spans | {
            first: LayerRange(0, 1, True, False),
            last: LayerRange(block_count - 1, block_count, False, True),
        }
    return spans | {
        first: LayerRange(0, 0, True, False),
        last: LayerRange(len(blocks), len(blocks), False, True),
    }
