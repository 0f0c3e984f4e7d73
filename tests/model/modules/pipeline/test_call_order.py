"""The order of a module's blocks, found by one pass without values: results, their uses, refused orders.

Also model/modules/nested_tensors.py, and the messages of model/modules/pipeline/stage_split.py.
"""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from hpctrain.comm.planned import META
from hpctrain.errors import HpctrainError
from hpctrain.model.modules.module_architecture import find_blocks
from hpctrain.model.modules.module_call import make_call
from hpctrain.model.modules.nested_tensors import TensorPlaceholder, map_leaves, tensor_leaves
from hpctrain.model.modules.pipeline.call_order import CallOrder, CallResult, trace_call_order
from hpctrain.model.modules.pipeline.stage_split import StageMessage, order_problems, tensors_between
from tests.model.modules import models, staged_models

H = 8


def order(build: Callable[[], nn.Module], pattern: str = "layers.*", sequence: int = 16) -> CallOrder:
    with META:
        module = build()
    tokens = torch.zeros(2, sequence, dtype=torch.int64)
    call = make_call(module, ("tokens",))
    return trace_call_order(module, lambda: call({"tokens": tokens}), find_blocks(module, pattern))


def gives(found: CallOrder, name: str) -> list[tuple[list[int], int | None]]:
    """Shapes of all that a call gives, and the last position that uses each."""
    (number,) = (number for number, call in enumerate(found.calls) if call.name == name)
    specs = enumerate(found.calls[number].specs)
    return [(list(spec.shape), found.last_uses.get(CallResult(number, leaf))) for leaf, spec in specs]


def test_of_a_gpt() -> None:
    found = order(staged_models.unscaled, sequence=32)
    assert [call.name for call in found.calls] == [
        "embed",
        *(f"layers.{n}" for n in range(4)),
        "norm",
        "head",
    ]
    assert [call.position for call in found.calls] == [0, 1, 3, 5, 7, 8, 8]
    assert gives(found, "layers.1") == [([2, 32, 32], 5), ([], 8)]
    assert found.parameters["embed.weight"] == {0, 8}
    assert found.parameters["positions"] == {0, 1}  # used by what the first block is given
    assert found.parameters["layers.2.norm1.weight"] == {5}
    # Of every block before what it gives besides, and of the last one before both.
    assert [spec.elements for spec in map(found.spec, tensors_between(found, 3))] == [1, 1, 2048, 1]
    assert StageMessage.of(found) == StageMessage(2048 + 4, torch.float32)


def test_of_blocks_that_give_dicts() -> None:
    found = order(staged_models.dicts, "rows.*")
    x, moment = [2, 16, 16], [2]
    assert gives(found, "rows.0") == [(x, 3), (moment, 8)]
    assert gives(found, "rows.2") == [(x, 7), (moment, 8)]
    row = found.calls[[call.name for call in found.calls].index("rows.1")]
    assert row.structure["state"].history[0].is_argument and row.structure["mask"].is_argument
    assert row.structure["number"] == 3 and row.structure["state"].told == "block"
    assert [spec.modified for spec in row.specs] == [True, True]
    assert gives(found, "embed") == [(x, 8)]
    assert found.parameters["between.1.weight"] == {4}
    assert found.parameters["never.weight"] == {0}
    assert "rows.2.batch_norm.num_batches_tracked" in found.written
    assert {name for name in found.written if name.startswith("rows.0")} == {
        f"rows.0.batch_norm.{each}" for each in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert not list(order_problems(found, (1, 1, 1, 1))) and not list(order_problems(found, (4, 0)))


class Rows(nn.Module):
    """Blocks with something about them."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(models.VOCABULARY, H), nn.Linear(H, models.VOCABULARY)
        self.layers = nn.ModuleList(self.block(number) for number in range(blocks))

    def block(self, number: int) -> nn.Module:
        return nn.Linear(H, H)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Twice(Rows):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers[0](self.layers[1](self.layers[2](self.layers[0](self.embed(tokens))))))


class Backwards(Rows):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers[2](self.layers[0](self.layers[1](self.embed(tokens)))))


class Skipped(Rows):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers[1](self.layers[0](self.embed(tokens))))


class InPlace(Rows):
    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(super().forward(x.clone()))

    def block(self, number: int) -> nn.Module:
        return InPlace.Block(H, H)


class Counted(Rows):
    """Blocks that give integers, which those behind use."""

    class Block(nn.Linear):
        def forward(self, arguments: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            x, count = arguments
            y = super().forward(x) + count.unsqueeze(-1)
            return y, (y > 0).sum(-1)

    def block(self, number: int) -> nn.Module:
        return Counted.Block(H, H)

    def forward(self, tokens: Tensor) -> Tensor:
        arguments = self.embed(tokens), tokens
        for layer in self.layers:
            arguments = layer(arguments)
        return self.head(arguments[0])


class Left(Rows):
    """A block that leaves what another one takes."""

    class Block(nn.Linear):
        def forward(self, x: Tensor, kept: dict[str, Tensor]) -> Tensor:
            kept.setdefault("first", torch.tanh(x))
            return super().forward(x) * kept["first"]

    def block(self, number: int) -> nn.Module:
        return Left.Block(H, H)

    def forward(self, tokens: Tensor) -> Tensor:
        x, kept = self.embed(tokens), dict[str, Tensor]()
        for layer in self.layers:
            x = layer(x, kept)
        return self.head(x)


class Detached(Rows):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x.detach())
        return self.head(x)


class Bag(Rows):
    class Block(nn.Linear):
        def forward(self, arguments: SimpleNamespace) -> SimpleNamespace:
            return SimpleNamespace(x=super().forward(arguments.x))

    def block(self, number: int) -> nn.Module:
        return Bag.Block(H, H)

    def forward(self, tokens: Tensor) -> Tensor:
        arguments = SimpleNamespace(x=self.embed(tokens))
        for layer in self.layers:
            arguments = layer(arguments)
        return self.head(arguments.x)


class Shared(Rows):
    """Neighbours with one weight."""

    def __init__(self) -> None:
        super().__init__(4)
        self.layers[2].weight = self.layers[1].weight


class Counter(Rows):
    """A buffer that is changed between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            self.seen.add_(1)
            x = layer(x)
        return self.head(x)


class Chosen(Rows):
    """Its code depends on values of what it is given, not on what is computed of parameters."""

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=self.head.weight.device)
        assert bool((positions.diff() == 1).all()) and int(tokens.max()) < models.VOCABULARY
        return super().forward(tokens)


def test_code_may_depend_on_values_of_inputs() -> None:
    assert [call.name for call in order(Chosen).calls][-1] == "head"


class Routed(Rows):
    """Blocks that run a loop over the experts that tokens have chosen."""

    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            routed, made = super().forward(x), torch.zeros_like(x)
            for expert in (nn.functional.one_hot(routed.argmax(-1), H).sum((0, 1)) > 0).nonzero():
                if expert[0] == H:
                    continue
                samples, tokens = torch.where(routed.argmax(-1) == int(expert.item()))
                made = made.index_put((samples, tokens), x[samples, tokens] + expert[0])
            return made

    def block(self, number: int) -> nn.Module:
        return Routed.Block(H, H)


def test_code_of_blocks_may_depend_on_values() -> None:
    found = order(Routed)
    assert gives(found, "layers.1") == [([2, 16, H], 6)]
    assert found.parameters["layers.1.weight"] == {3}


class Unknown(Rows):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return super().forward(tokens) if float(x.detach().sum()) > 0 else x


def test_code_that_depends_on_parameters_has_no_order() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        order(Unknown)


REFUSED: Mapping[type[nn.Module], str] = {
    Twice: "block layers.0 is called 2 times in a forward pass",
    Backwards: "block layers.1 is called instead of block layers.0 (pipeline",
    Skipped: "block layers.2 is not called in a forward pass",
    InPlace: "layers.0: changes its input in place and returns it (return",
    Bag: "layers.0: returns a SimpleNamespace that contains tensors, which",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_passes_that_stages_cannot_follow_are_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(HpctrainError) as caught:
        order(kind)
    (told,) = caught.value.problems
    assert told.startswith(REFUSED[kind]), told


CUT: list[tuple[Callable[[], nn.Module], tuple[int, ...], str | None]] = [
    (Rows, (1, 2), None),
    (Rows, (3, 0), None),
    (Counted, (2, 1), "layers.1 returns int64 [2, 16], which block layers.2 uses on another stage"),
    (Left, (1, 2), "block layers.2, on another stage, uses a tensor of layers.0"),
    (Detached, (1, 2), None),
    (Shared, (1, 2, 1), None),
    (Shared, (2, 2), None),
    (Shared, (1, 1, 2), "the parameter layers.1.weight, which is used by block layers.1 and block layers.2"),
    (
        Counter,
        (1, 2),
        "the buffer seen, which a forward pass changes and which is used by the part before the blocks, ",
    ),
    (models.gpt, (1, 2), None),
    (
        models.gpt,
        (1, 1, 1),
        "the parameter scale, which is used by block layers.0, block layers.1 and block layers.2",
    ),
]


@pytest.mark.parametrize(("build", "split", "told"), CUT)
def test_where_a_module_cannot_be_cut(
    build: Callable[[], nn.Module], split: tuple[int, ...], told: str | None
) -> None:
    problems = list(order_problems(order(build), split))
    assert all(told is not None and told in each for each in problems), problems
    assert bool(problems) == (told is not None)


Pair = namedtuple("Pair", ["one", "other"])


@dataclass
class Held:
    value: Tensor
    rest: list[Tensor]


def test_structures_are_filled_anew() -> None:
    from transformers.modeling_outputs import CausalLMOutput

    a, b, c = torch.zeros(1), torch.ones(2), torch.full((3,), 2.0)
    arguments = {
        "pair": Pair(a, None),
        "row": [OrderedDict(inner=b, n=3), "text", (c,)],
        "held": Held(a, [b]),
        "output": CausalLMOutput(logits=c),
    }
    assert [each.numel() for each in tensor_leaves(arguments)] == [1, 2, 3, 1, 2, 3]
    places = map_leaves(arguments, lambda each: TensorPlaceholder(each.numel(), is_argument=False))
    assert [each.number for each in tensor_leaves(places)] == [1, 2, 3, 1, 2, 3]
    again = map_leaves(places, lambda each: torch.zeros(each.number))
    assert type(again["pair"]) is Pair and again["pair"].other is None and again["row"][1] == "text"
    assert type(again["row"][0]) is OrderedDict and again["row"][0]["n"] == 3
    assert type(again["output"]) is CausalLMOutput and again["output"].logits.shape == (3,)
    assert again["held"].rest[0].shape == (2,) and arguments["held"].rest[0] is b
