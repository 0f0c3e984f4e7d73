"""One decoder-only transformer for GPT-2 and Llama, from parallel layers.

Activations are sequence first, [s, b, h]; under sequence parallelism [s/t, b, h] between the layers
that are split over the tensor axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpctrain.model.attention import Attention, Rotary
from hpctrain.model.feed_forward import FeedForward
from hpctrain.model.norm import Norm
from hpctrain.model.shape import ModelShape
from hpctrain.parallel.groups import LayerGroups
from hpctrain.parallel.keeping import Layer
from hpctrain.parallel.random import DropoutSource, dropout
from hpctrain.parallel.residency import Residency
from hpctrain.parallel.shard import Parameter, Shard
from hpctrain.parallel.vocabulary import VocabularyEmbedding, VocabularyHead, vocabulary_shard

Computed = TypeVar("Computed")


@dataclass(frozen=True)
class Inputs:
    """One micro-batch as this rank's model sees it.

    `tokens` [s, b] int64; `positions` [s] int64, global positions of the local piece of the
    sequence; `dropout` draws masks, or is None where nothing is dropped.
    """

    tokens: Tensor
    positions: Tensor
    dropout: DropoutSource | None = None


class PositionEmbedding(nn.Module):
    """Adds a learned row per position to [s or s/t, b, h]."""

    def __init__(self, name: str, shape: ModelShape, groups: LayerGroups) -> None:
        super().__init__()
        size = (shape.sequence, shape.hidden)
        self.table = Parameter(Shard.whole(f"{name}.weight", size, groups.sequence_partial))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rows of x stand at `positions`."""
        return x + functional.embedding(positions, self.table).unsqueeze(1)


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and with a residual connection."""

    def __init__(self, index: int, shape: ModelShape, groups: LayerGroups) -> None:
        super().__init__()
        name = f"blocks.{index}"
        self.site, self.probability = 1 + 2 * index, shape.dropout
        self.attention_norm = Norm(f"{name}.attention_norm", shape, groups)
        self.attention = Attention(f"{name}.attention", shape, groups)
        self.feed_forward_norm = Norm(f"{name}.feed_forward_norm", shape, groups)
        self.feed_forward = FeedForward(f"{name}.feed_forward", shape, groups)
        self.parameter_tuple = tuple(p for p in self.parameters() if isinstance(p, Parameter))

    @property
    def unit(self) -> Parameter:
        """The parameter that stands for the block, see Residency."""
        return self.attention_norm.weight

    def forward(
        self, x: Tensor, rotary: Rotary | None, source: DropoutSource | None, positions: Tensor
    ) -> Tensor:
        """[s or s/t, b, h], whose rows stand at `positions`, -> the same."""
        attended = self.attention(self.attention_norm(x), rotary)
        x = x + dropout(attended, source, self.site, positions, self.probability)
        expanded = self.feed_forward(self.feed_forward_norm(x))
        return x + dropout(expanded, source, self.site + 1, positions, self.probability)


@dataclass(frozen=True)
class Part:
    """Which piece of the model a pipeline stage's chunk is: blocks `first` to `last` (exclusive).

    The first part embeds, the last one predicts. `tied_stage` numbers this stage among those that hold
    tied embeddings, of which there are `tied_stages`.
    """

    first: int
    last: int
    embeds: bool
    predicts: bool
    tied_stage: int = 0
    tied_stages: int = 1

    @staticmethod
    def whole(layers: int) -> Part:
        """All of a model in one piece."""
        return Part(0, layers, True, True)


class Transformer(nn.Module):
    """Embedding, blocks, final norm and head, or the piece of these that `part` says.

    Its parameters are without memory until bucketed. `table` is the embedding's table where another chunk
    of the same stage holds it and the two are tied.
    """

    def __init__(
        self,
        shape: ModelShape,
        groups: LayerGroups,
        part: Part | None = None,
        table: Parameter | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.groups = shape, groups
        self.residency = Residency()
        self.part = part if part is not None else Part.whole(shape.layers)
        self.embedding: VocabularyEmbedding | None = None
        self.positions: PositionEmbedding | None = None
        self.vocabulary_head: VocabularyHead | None = None
        if self.part.embeds:
            self.embedding = VocabularyEmbedding(self._table("embedding.tokens.weight", shape.tied), groups)
            if shape.family == "gpt2":
                self.positions = PositionEmbedding("embedding.positions", shape, groups)
        blocks = range(self.part.first, self.part.last)
        self.blocks = nn.ModuleList(Block(index, shape, groups) for index in blocks)
        if self.part.predicts:
            self.final_norm = Norm("final_norm", shape, groups)
            if shape.tied and self.embedding is not None:
                table = self.embedding.table
            if shape.tied and table is not None:
                table.uses = 2
                # Lookup and head of one stage's two chunks add in an order that the schedule decides.
                table.apart = self.embedding is None
            else:
                name = "embedding.tokens.weight" if shape.tied else "head.weight"
                table = self._table(name, shape.tied)
                self.head = nn.Module()
                self.head.register_parameter("table", table)
            self.vocabulary_head = VocabularyHead(table, groups)

    def _table(self, name: str, tied: bool) -> Parameter:
        """A table [V, h], one of two where it is tied and lies on two stages."""
        shard = vocabulary_shard(name, self.shape.vocabulary, self.shape.hidden, self.groups)
        if tied:
            part = self.part
            shard = replace(shard, stage_copy=part.tied_stage, stage_copies=part.tied_stages)
        return Parameter(shard)

    def block_list(self) -> list[Block]:
        """The blocks of this part."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def units(self) -> Iterator[list[list[Parameter]]]:
        """What computes together, in the order of the forward pass: embedding, blocks, final norm, head.

        Of each unit its layers' parameters; those of one layer stay together. Every parameter once.
        """
        units: list[list[nn.Module | None]] = [[self.embedding, self.positions]]
        units += [[block] for block in self.blocks]
        if self.part.predicts:
            units += [[self.final_norm], [getattr(self, "head", None)]]
        for unit in units:
            leaves = [leaf for module in unit if module is not None for leaf in _leaves(module)]
            if leaves:
                yield leaves

    def forward(self, inputs: Inputs, hidden: Tensor | None = None) -> Tensor:
        """Hidden states [s or s/t, b, h] after this part: of the tokens, or of the part before's `hidden`.

        The part that predicts ends with the final norm.
        """
        positions = self._local(inputs.positions)
        if self.embedding is not None:
            with self.residency.held(self.embedding.table):
                x: Tensor = self.embedding(inputs.tokens)
                if self.positions is not None:
                    x = self.positions(x, positions)
            x = dropout(x, inputs.dropout, 0, positions, self.shape.dropout)
        else:
            assert hidden is not None
            x = hidden
        rotary = None
        if self.shape.family == "llama":
            rotary = Rotary(inputs.positions, self.shape.head_size, self.shape.rope_base, x.dtype)
        layers = []
        for block in self.block_list():
            compute = partial(block, rotary=rotary, source=inputs.dropout, positions=positions)
            around = partial(self.residency.around, block.unit, compute)
            layers.append(Layer(around, block.parameter_tuple))
        x = self.groups.keeping.run(layers, x, rotary.tables if rotary is not None else ())
        if self.part.predicts:
            x = self.residency.around(self.final_norm.weight, self.final_norm, x)
        return x

    def predict(self, hidden: Tensor, compute: Callable[[VocabularyHead, Tensor], Computed]) -> Computed:
        """What `compute` makes of the head and of the last hidden states, on the part that predicts."""
        assert self.vocabulary_head is not None
        with self.residency.held(self.vocabulary_head.table):
            return compute(self.vocabulary_head, hidden)

    def hidden_shape(self, micro_size: int) -> tuple[int, int, int]:
        """Shape of what passes from part to part."""
        tensor, context = self.groups.tensor.size, self.groups.context.size
        rows = self.shape.sequence // context // (tensor if self.groups.sequence_parallel else 1)
        return rows, micro_size, self.shape.hidden

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [b, s, V] of tokens [b, s]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self(Inputs(tokens.t().contiguous(), positions))
        return self.predict(hidden, VocabularyHead.logits).transpose(0, 1)

    def _local(self, positions: Tensor) -> Tensor:
        """The positions of this rank's rows between the split layers."""
        tensor = self.groups.tensor
        return positions.chunk(tensor.size)[tensor.rank] if self.groups.sequence_parallel else positions


def parameter_list(model: Transformer) -> list[Parameter]:
    """All parameters, each once, in the order of the forward pass."""
    return [parameter for unit in model.units() for leaf in unit for parameter in leaf]


def _leaves(module: nn.Module) -> Iterator[list[Parameter]]:
    """The parameters of each of a module's layers."""
    for layer in module.modules():
        parameters = [p for p in layer.parameters(recurse=False) if isinstance(p, Parameter)]
        if parameters:
            yield parameters
