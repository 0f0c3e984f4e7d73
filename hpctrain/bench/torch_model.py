"""The same model trained by torch's own tensor parallelism over gloo, to be measured against.

Only what hpctrain is measured against uses torch.distributed: this file, those beside it whose names begin
with torch_, and `bench/peers.py`.
The parallel plan is that of torch's tensor-parallel tutorial for Llama, with and without sequence
parallelism; the embedding is split by rows, the head by columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.deck.sources import toml_value
from hpctrain.errors import HpctrainError
from hpctrain.model.attention import Rotary, turned
from hpctrain.model.part import Span
from hpctrain.model.precision import Precision
from hpctrain.model.shape import ModelShape


class _Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        inner, whole = shape.head_size * shape.key_value_heads, shape.head_size * shape.heads
        self.head_size = shape.head_size
        self.query = nn.Linear(shape.hidden, whole, bias=shape.biases)
        self.key = nn.Linear(shape.hidden, inner, bias=shape.biases)
        self.value = nn.Linear(shape.hidden, inner, bias=shape.biases)
        self.output = nn.Linear(whole, shape.hidden, bias=shape.biases)

    def forward(self, x: Tensor, rotary: Rotary | None) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_size)) for layer in (self.query, self.key, self.value)
        )
        if rotary is not None:
            query, key = (
                turned(part.transpose(0, 1), *rotary.tables).transpose(0, 1) for part in (query, key)
            )
        shared = query.shape[2] != key.shape[2]
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=shared
        )
        output: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return output


class _FeedForward(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.mlp, bias=False) if shape.family == "llama" else None
        self.up = nn.Linear(shape.hidden, shape.mlp, bias=shape.biases)
        self.down = nn.Linear(shape.mlp, shape.hidden, bias=shape.biases)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        if self.gate is None:
            inner = functional.gelu(inner, approximate="tanh")
        else:
            inner = functional.silu(self.gate(x)) * inner
        output: Tensor = self.down(inner)
        return output


def torch_norm(shape: ModelShape) -> nn.Module:
    """The norm of the model's family."""
    kind = nn.LayerNorm if shape.family == "gpt2" else nn.RMSNorm
    return kind(shape.hidden, eps=shape.norm_epsilon)


class TorchBlock(nn.Module):
    """Attention and feed-forward in plain torch, [b, s, h]."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm, self.attention = torch_norm(shape), _Attention(shape)
        self.feed_forward_norm, self.feed_forward = torch_norm(shape), _FeedForward(shape)

    def forward(self, x: Tensor, rotary: Rotary | None) -> Tensor:
        """[b, s, h] -> the same."""
        x = x + self.attention(self.attention_norm(x), rotary)
        output: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return output


class TorchModel(nn.Module):
    """The deck's model, or the piece of it that `span` says, in plain torch.

    Batch first; positions of gpt2 are learned.
    """

    def __init__(self, shape: ModelShape, span: Span | None = None) -> None:
        super().__init__()
        for key, value in (("query_key_norm", "none"), ("experts", 0)):
            if getattr(shape, key) != value:
                given = toml_value(getattr(shape, key))
                raise HpctrainError(
                    f"model.{key} = {given}: the peers in plain torch have {toml_value(value)} alone"
                )
        self.shape = shape
        span = span if span is not None else Span.all_of(shape.layers)
        embeds, predicts = span.embeds, span.predicts
        learned = embeds and shape.family == "gpt2"
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden) if embeds else None
        self.positions = nn.Embedding(shape.sequence, shape.hidden) if learned else None
        self.blocks = nn.ModuleList(TorchBlock(shape) for _ in range(span.blocks))
        self.final_norm = torch_norm(shape) if predicts else None
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False) if predicts else None
        if shape.tied and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [b, s] or hidden states [b, s, h] -> hidden states, or logits [b, s, V]."""
        positions = torch.arange(x.shape[1])
        if self.embedding is not None:
            x = self.embedding(x)
        if self.positions is not None:
            x = x + self.positions(positions)
        rotary = None
        if self.shape.family == "llama":
            rotary = Rotary(positions, self.shape.head_size, self.shape.rope_base, x.dtype)
        for block in self.blocks:
            x = block(x, rotary)
        return x if self.head is None or self.final_norm is None else self.head(self.final_norm(x))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of logits [b, s, V] where targets [b, s] come next."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def torch_step(rival: str, deck: Deck, world: World) -> Callable[[], None]:
    """One optimizer step of the deck's global batch by "torch-tensor" or "torch-sequence", over gloo."""
    assert deck.model.vocabulary is not None
    shape = ModelShape.of(deck, deck.model.vocabulary)
    if deck.layout.tensor != world.size:
        raise HpctrainError("--against: needs a deck whose layout.tensor is the number of ranks")
    torch.manual_seed(deck.run.seed)
    model = TorchModel(shape).to(Precision.of(deck).storage)
    _parallelize(model, rival == "torch-sequence", init_device_mesh("cpu", (world.size,)))
    # Torch's foreach optimizer takes split and whole parameters in groups of their own; clipping, which
    # takes no mixture either, is left out, to torch's advantage.
    split = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    groups = [{"params": part} for part in (split, whole) if part]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, foreach=True)
    micro = deck.batch.micro_size
    count = deck.batch.global_size // micro
    tokens = torch.randint(shape.vocabulary, (count, micro, shape.sequence + 1))

    def step() -> None:
        for batch in tokens:
            (loss_of(model(batch[:, :-1]), batch[:, 1:]) / count).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _parallelize(model: TorchModel, local: bool, mesh: DeviceMesh) -> None:
    """`local` is whether each rank has its part of the sequence between the split layers."""
    between = Shard(1) if local else Replicate()
    outer = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    if local:
        outer["final_norm"] = SequenceParallel()
    if model.positions is not None and local:
        # Learned positions are added to the split sequence, as a split sequence themselves.
        outer["positions"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
    parallelize_module(model, mesh, outer)
    inner = {
        "attention": PrepareModuleInput(
            input_layouts=(between, None), desired_input_layouts=(Replicate(), None)
        ),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(output_layouts=between),
        "feed_forward": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        "feed_forward.gate": ColwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=between),
    }
    if local:
        inner |= {"attention_norm": SequenceParallel(), "feed_forward_norm": SequenceParallel()}
    if model.shape.family == "gpt2":
        del inner["feed_forward.gate"]
    for block in model.blocks:
        parallelize_module(block, mesh, inner)
