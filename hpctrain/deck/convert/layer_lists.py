"""Lists with a number for each layer, which options of Megatron-LM have in Python's notation."""

from __future__ import annotations

import ast

from hpctrain.deck.convert.option_values import UnsupportedOptionError

_LONGEST_TEXT = 10_000
MOST_LAYERS = 10_000
"""Largest number of layers of a list."""

_REASON = "must be a number or a list of 0 and 1 for all layers, such as [0]*3+[1]*58"


def layer_flags(text: str) -> list[bool]:
    """Return the flags of all layers that an expression lists, such as "([0]*3+[1])*2". Nothing is executed.

    Args:
        text: Lists of 0 and 1, sums of lists, and products of a list and a number.

    Raises:
        UnsupportedOptionError: The text is something else, or it has no or too many layers.
    """
    try:
        if len(text) > _LONGEST_TEXT:
            raise ValueError(text)
        flags = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UnsupportedOptionError(_REASON) from None
    if not flags:
        raise UnsupportedOptionError(_REASON)
    return flags


def _evaluate(node: ast.expr) -> list[bool]:
    """Return the flags of an expression; ValueError for another one."""
    match node:
        case ast.List(elts=elements):
            numbers = [each.value if isinstance(each, ast.Constant) else None for each in elements]
            if any(type(number) is not int or number not in (0, 1) for number in numbers):
                raise ValueError(numbers)
            return [number == 1 for number in numbers]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            flags = _evaluate(left) + _evaluate(right)
        case (
            ast.BinOp(left=of, op=ast.Mult(), right=ast.Constant(value=int(times)))
            | ast.BinOp(left=ast.Constant(value=int(times)), op=ast.Mult(), right=of)
        ):
            repeated = _evaluate(of)
            if len(repeated) * times > MOST_LAYERS:
                raise ValueError(times)
            flags = repeated * times
        case _:
            raise ValueError(node)
    if len(flags) > MOST_LAYERS:
        raise ValueError(len(flags))
    return flags
