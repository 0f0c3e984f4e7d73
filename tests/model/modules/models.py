"""Modules as users write them, in plain torch: nothing of ours is in here."""

from __future__ import annotations

from collections import namedtuple

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 61


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, hidden // heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(b, s, -1))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x if scale is None else x * scale, {"mean": x.mean()}


class Gpt(nn.Module):
    """Tied embeddings, learned positions, blocks that take and give more than one tensor."""

    def __init__(self, hidden: int, layers: int, heads: int, sequence: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.positions = nn.Parameter(torch.randn(sequence, hidden) * 0.1)
        self.scale = nn.Parameter(torch.ones(()) * 0.9)
        self.layers = nn.ModuleList(Block(hidden, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("places", torch.arange(sequence), persistent=False)
        nn.init.normal_(self.embed.weight, std=0.2)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens) + self.positions[self.places[: tokens.shape[1]]]
        total = x.new_zeros(())
        for layer in self.layers:
            x, told = layer(x, scale=self.scale)
            total = total + told["mean"].detach()
        return self.head(self.norm(x)), total


def gpt(
    hidden: int = 32, layers: int = 3, heads: int = 4, sequence: int = 32, dropout: float = 0.0
) -> nn.Module:
    return Gpt(hidden, layers, heads, sequence, dropout)


class Odd(nn.Module):
    """A block and a table used twice, a bias of two blocks, parameters that are never used, or in some
    batches alone, a frozen one, BatchNorm; its result is a named tuple.
    """

    result = namedtuple("result", ["other", "logits"])

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCABULARY, hidden) * 0.3)
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))
        self.frozen = nn.Linear(hidden, hidden)
        self.frozen.requires_grad_(False)
        self.never = nn.Linear(hidden, 3)
        self.sometimes = nn.Linear(hidden, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.same = self.blocks[1]
        self.blocks[1].bias = self.blocks[0].bias

    def forward(self, input_ids: Tensor, use_cache: bool = True) -> tuple[Tensor, Tensor]:
        assert not use_cache
        x = functional.embedding(input_ids, self.table)
        x = torch.tanh(self.blocks[0](x))
        x = x + torch.tanh(self.same(x))
        x = x + self.frozen(self.blocks[1](x))
        if int(input_ids[0, 0]) % 2:
            x = x + 0.5 * torch.tanh(self.sometimes(x))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return Odd.result(x.mean(), x @ self.table.t())


def odd(hidden: int = 16) -> nn.Module:
    return Odd(hidden)


def llama(**config: float) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**config))


def every_second(outputs: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A loss of a user's own: of every second token alone."""
    logits, targets = outputs[0][:, ::2].float(), batch["targets"][:, ::2]
    known = targets >= 0
    losses = functional.cross_entropy(logits[known], targets[known], reduction="sum")
    return losses, known.sum()


class Twice(nn.Module):
    """A block that is called twice, a scale of features that ranks share, a padded table, a head with a
    bias, and a layer whose features are needed whole.
    """

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden, padding_idx=3)
        self.norm, self.last = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)
        self.level = nn.Parameter(torch.ones(2, 1))
        self.mix, self.back = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, VOCABULARY)

    def inner(self, x: Tensor) -> Tensor:
        y = functional.gelu(self.up(x))
        # One scale for even features and one for odd ones, whoever has which.
        y = y * self.level[[0, 1] * (y.shape[-1] // 2), 0]
        return self.drop(self.down(y))

    def forward(self, tokens: Tensor, use_cache: bool = True) -> dict[str, Tensor]:
        assert not use_cache
        x = self.embed(tokens)
        for _ in range(2):
            x = x + self.inner(self.norm(x))
        y = self.mix(x)
        x = x + self.back(y - y.mean(-1, keepdim=True))
        return {"logits": torch.tanh(self.head(self.last(x)) / 5) * 5}


def twice(hidden: int = 16, dropout: float = 0.0) -> nn.Module:
    return Twice(hidden, dropout)


class LatentAttention(nn.Module):
    """Attention whose heads share a part of their keys, with a sink for each head and a decay of its values.

    The decay of a head is computed from the values of all heads.
    """

    def __init__(self, hidden: int, heads: int, size: int) -> None:
        super().__init__()
        self.size, self.shared = size, size // 2
        self.queries = nn.Linear(hidden, heads * size)
        self.compressed = nn.Linear(hidden, hidden // 2 + self.shared)
        self.expanded = nn.Linear(hidden // 2, heads * (size - self.shared + size))
        self.decays = nn.Linear(heads * size, heads)
        self.sinks = nn.Parameter(torch.randn(heads))
        self.out = nn.Linear(heads * size, hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        queries = self.queries(x).view(b, s, -1, self.size).transpose(1, 2)
        latent, shared = self.compressed(x).split(
            [self.compressed.out_features - self.shared, self.shared], -1
        )
        expanded = self.expanded(latent).view(b, s, queries.shape[1], -1).transpose(1, 2)
        keys, values = expanded.split([self.size - self.shared, self.size], -1)
        keys = torch.cat([keys, shared[:, None].expand(-1, keys.shape[1], -1, -1)], -1)
        decays = torch.sigmoid(self.decays(values.transpose(1, 2).flatten(2))).transpose(1, 2)
        scores = queries @ keys.transpose(2, 3) + torch.full((s, s), -torch.inf).triu(1).to(x)
        sinks = self.sinks.view(1, -1, 1, 1).expand(b, -1, s, 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return self.out((weights @ (values * decays[..., None])).transpose(1, 2).flatten(2))


class SortedExperts(nn.Module):
    """Experts in tensors [experts, ...] that take rows [experts * n, hidden] in their order."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, hidden, 2 * hidden) * 0.2)
        self.down = nn.Parameter(torch.randn(experts, 2 * hidden, hidden) * 0.2)

    def forward(self, rows: Tensor) -> Tensor:
        of_experts = rows.view(self.up.shape[0], -1, rows.shape[-1])
        return (functional.gelu(of_experts @ self.up) @ self.down).view_as(rows)


class SharedExperts(nn.Module):
    """Experts of all tokens, each with a weight, whose features ranks can split."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, 2 * hidden, hidden) * 0.2)
        self.down = nn.Parameter(torch.randn(experts, hidden, 2 * hidden) * 0.2)
        self.slope = nn.Parameter(torch.ones(()) * 0.7)

    def forward(self, x: Tensor, *, gates: dict[str, Tensor]) -> tuple[Tensor]:
        up = torch.einsum("bsh,enh->ebsn", x, self.up)
        active = functional.silu(up * self.slope) * gates["experts"].movedim(-1, 0)[..., None]
        return (torch.einsum("ebsn,ehn->bsh", active, self.down),)


class ExpertsWithIdentities(nn.Module):
    """Experts of which the last ones return their input. The first tensor has a row for these, too."""

    def __init__(self, hidden: int, experts: int, identities: int) -> None:
        super().__init__()
        self.num_routed_experts, self.total_experts = experts, experts + identities
        self.identity_expert = nn.Identity()
        self.up = nn.Parameter(torch.randn(experts + identities, 2 * hidden, hidden) * 0.2)
        self.down = nn.Parameter(torch.randn(experts, hidden, 2 * hidden) * 0.2)

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(tokens)
        for expert in chosen.unique().tolist():
            assert expert < self.total_experts
            rows, places = torch.where(chosen == expert)
            value = self.identity_expert(tokens[rows])
            if expert < self.num_routed_experts:
                value = functional.gelu(value @ self.up[expert].t()) @ self.down[expert].t()
            result = result.index_add(0, rows, value * weights[rows, places, None])
        return result


class Latent(nn.Module):
    """Latent attention, and a sum of sorted experts, shared experts, and experts that tokens choose."""

    def __init__(self, hidden: int, heads: int, experts: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = LatentAttention(hidden, heads, 8)
        self.router = nn.Linear(hidden, 2 * experts)
        self.experts = SortedExperts(hidden, experts)
        self.shared = SharedExperts(hidden, experts)
        self.choices = nn.Linear(hidden, experts + 3)
        self.chosen = ExpertsWithIdentities(hidden, experts, 3)
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        gates, scores = torch.sigmoid(self.router(y)).chunk(2, -1)
        rows = (y * scores.movedim(-1, 0)[..., None]).reshape(-1, y.shape[-1])
        x = x + self.experts(rows).view(-1, *y.shape).sum(0) + self.shared(y, gates={"experts": gates})[0]
        weights, chosen = self.choices(y).softmax(-1).flatten(0, 1).topk(2)
        x = x + self.chosen(y.flatten(0, 1), chosen, weights).view_as(y)
        return self.head(x)


def latent(hidden: int = 16, heads: int = 4, experts: int = 4) -> nn.Module:
    return Latent(hidden, heads, experts)


class Branching(nn.Module):
    """Module whose forward pass depends on the values that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.last(x if x.mean() > 0 else -x)


def thirds(module: nn.Module) -> None:
    """Initial values of a user's own: as the module has them, by three, and random ones for norms."""
    for name, parameter in module.named_parameters():
        parameter.data = torch.rand_like(parameter) if "norm" in name else parameter.data / 3


def refuses(module: nn.Module) -> None:
    raise ValueError("not these")


def other_shape(module: nn.Module) -> None:
    module.norm.weight = nn.Parameter(torch.ones(4, 4))


def deletes(module: nn.Module) -> None:
    weight = module.norm.weight
    del module.norm.weight
    module.norm.register_buffer("weight", weight)


def adds(module: nn.Module) -> None:
    module.norm.more = nn.Parameter(torch.ones(3))


def unties(module: nn.Module) -> None:
    module.head.weight = nn.Parameter(module.embed.weight.detach().clone())


def freezes(module: nn.Module) -> None:
    module.norm.weight.requires_grad_(False)


def other_buffer(module: nn.Module) -> None:
    module.places = module.places[:1]


def takes_nothing() -> None:
    pass
