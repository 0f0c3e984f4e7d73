"""Attention of complete sequences, or of documents packed in them, by the compiled library."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpctrain.data.documents import Documents
from hpctrain.parallel.backward.autograd import apply_function
from hpctrain.parallel.kernels.attention_inputs import AttentionInputs, separate_sequences
from hpctrain.parallel.kernels.attention_tiles import AttentionRule, sinks_gradient
from hpctrain.parallel.kernels.functions.function_library import AttentionArguments, Heads, workspace_floats


def compiled_attention(library: ctypes.CDLL, inputs: AttentionInputs, rule: AttentionRule) -> Tensor:
    """Return the causal softmax attention [s, b, heads, d] of complete sequences.

    Args:
        library: The library.
        inputs: Queries, keys, values, and what else attention depends on.
        rule: Scale, window and soft cap.
    """
    query, key, value, sinks, tables, documents = inputs
    options = _Options(library, tables, rule, documents)
    result: Tensor = apply_function(_CompiledAttention, query, key, value, sinks, options)
    return result


class _Options(NamedTuple):
    """Arguments of compiled attention that have no gradients."""

    library: ctypes.CDLL
    tables: Sequence[Tensor]
    rule: AttentionRule
    documents: Documents | None


class _Sequences(NamedTuple):
    """Sequences, or one document of packed ones, that attend only to themselves.

    Attributes:
        selection: Positions and rows of the batch.
        tables: Tables of a Rotary for these positions, or none.
        log_sums: Memory of their log-sum-exps [rows, heads, length], and of all later ones.
    """

    selection: tuple[slice, slice]
    tables: Sequence[Tensor]
    log_sums: Tensor

    @staticmethod
    def of(log_sums: Tensor, options: _Options) -> Iterator[_Sequences]:
        """Yield all sequences at once, or each document, with memory of all log-sum-exps [b, heads, s]."""
        batch, heads, length = log_sums.shape
        for rows, begin, end in separate_sequences(options.documents, batch, length):
            tables = [table[begin:end] for table in options.tables]
            first = heads * (rows.start * length + begin)
            yield _Sequences((slice(begin, end), rows), tables, log_sums.view(-1)[first:])


class _CompiledAttention(torch.autograd.Function):
    """`compiled_attention` of queries, keys and values [s, b, heads, d].

    Rotates queries and keys first if there are tables. Saves the output and log-sum-exps, but no scores.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, options: _Options
    ) -> Tensor:
        query, key, value = map(with_contiguous_features, (query, key, value))
        length, batch, heads, features = query.shape
        output, log_sums = empty_contiguous(query), torch.empty(batch, heads, length)
        memory = torch.empty(workspace_floats(length, features))
        scores = None if sinks is None else sinks.float()
        for selection, tables, part in _Sequences.of(log_sums, options):
            operands = [x[selection] for x in (query, key, value, output)]
            sizes = attention_arguments(operands[0], operands[1], tables, options.rule, scores)
            options.library.attend(sizes, *map(heads_of, operands), part, memory)
        ctx.options = options
        ctx.save_for_backward(query, key, value, sinks, output, log_sums, *options.tables)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, log_sums, *tables = ctx.saved_tensors
        options: _Options = ctx.options._replace(tables=tables)
        gradient = with_contiguous_features(gradient)
        results = [empty_contiguous(x) for x in (query, key, value)]
        memory = torch.empty(workspace_floats(query.shape[0], query.shape[3]))
        sinks_gradients = []
        for selection, part_tables, part in _Sequences.of(log_sums, options):
            operands = [x[selection] for x in (query, key, value, output, gradient, *results)]
            sizes = attention_arguments(operands[0], operands[1], part_tables, options.rule)
            options.library.attend_gradient(sizes, *map(heads_of, operands), part, memory)
            if sinks is not None:
                length, batch, heads, _ = operands[3].shape
                natural = part[: batch * heads * length].view(batch, heads, length) * log(2)
                sinks_gradients.append(sinks_gradient(operands[4], operands[3], natural, sinks))
        return *results, torch.stack(sinks_gradients).sum(0) if sinks_gradients else None, None


def empty_contiguous(x: Tensor) -> Tensor:
    """Return an uninitialized contiguous tensor of the shape, format and device of x."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def with_contiguous_features(x: Tensor) -> Tensor:
    """Return x, or a copy whose last dim is contiguous, as compiled functions require."""
    return x if x.stride(3) == 1 else x.contiguous()


def heads_of(x: Tensor) -> Heads:
    """Return the address and strides of x [s, b, heads, d] for a compiled function."""
    return Heads(x.data_ptr(), *x.stride()[:3])


def attention_arguments(
    query: Tensor, key: Tensor, tables: Sequence[Tensor], rule: AttentionRule, sinks: Tensor | None = None
) -> AttentionArguments:
    """Return the arguments of a compiled function. The tables and sinks must outlive them.

    Args:
        query: Queries [s, b, heads, d].
        key: Keys, which may have fewer heads.
        tables: Tables of a Rotary, or none.
        rule: Scale, window and soft cap.
        sinks: Score [heads] of a further key of each head in fp32, contiguous; None without one.
    """
    rows, batch, heads, head = query.shape
    addresses: list[int | None] = [table.data_ptr() for table in tables]
    addresses += [] if tables else [None, None]
    sizes = rows, batch, heads, key.shape[2], head, query.element_size()
    at_sinks = None if sinks is None else sinks.data_ptr()
    return AttentionArguments(*sizes, rule.scale, *addresses, rule.window, rule.cap, at_sinks)
