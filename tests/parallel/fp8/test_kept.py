"""What is kept of inputs in 8 bits: the training of a run that keeps none, bit for bit, in fewer bytes.

Tests of parallel/fp8/quantized_matmul.py and costs/layer_bytes/matmul_bytes.py.
"""

from __future__ import annotations

import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.parallel.fp8 import matmul_choice as products
from hpctrain.parallel.fp8.delayed_matmul import DelayedMatmul
from hpctrain.parallel.fp8.quantized_matmul import QuantizedMatmul
from hpctrain.parallel.fp8.recipes import RECIPES
from hpctrain.parallel.matmul import Matmul
from tests.engines import LLAMA, small_deck, trainer
from tests.memory.test_recompute import predicted, saved_bytes

KEYS = ("precision.compute=fp8", "model.mlp=128", "batch.sequence=64", "batch.global_size=4")
LOCAL = ("layout.tensor=2", "layout.sequence_parallel=true", "model.hidden=64", "model.heads=4")
SPLIT = ("layout.pipeline=2", "layout.schedule=zb-h1", "batch.global_size=8")
LAYOUTS: dict[int, dict[str, tuple[str, ...]]] = {
    1: {
        "selective": (*LLAMA, "memory.recompute=selective"),
        "full": ("memory.recompute=full", "model.dropout=0.1"),
        "frozen": ('model.frozen=["embedding.*", "blocks.0.*", "blocks.1.attention.*"]', *LLAMA),
    },
    2: {
        "sequence": (*LOCAL, "memory.recompute=selective"),
        "split backward": SPLIT,
        "cut": (*LOCAL, "batch.micro_size=1"),
        "exchanged": ("layout.context=2", "layout.context_form=all_to_all", "layout.zero=3"),
    },
    4: {"sequence, split backward": (*LOCAL, *SPLIT)},
}
ALONE = {"split backward": {"tensor", "row"}, "exchanged": {"delayed", "mx"}, "cut": {"block"}}
"""Which recipes are tried, if not all."""


class Unkept(Matmul):
    """Inputs are kept as stored, and everything is quantized where it is multiplied."""

    forward_and_save = Matmul.forward_and_save
    gather_gradient = Matmul.gather_gradient


class UnkeptProduct(Unkept, QuantizedMatmul):  # type: ignore[misc]
    pass


class UnkeptDelayed(Unkept, DelayedMatmul):  # type: ignore[misc]
    pass


def layouts(ranks: int, recipe: str) -> dict[str, tuple[str, ...]]:
    wide = {"mx": ("model.hidden=128",), "block": ("model.hidden=256", "model.mlp=256", "batch.sequence=128")}
    found = {
        name: keys for name, keys in LAYOUTS.get(ranks, {}).items() if recipe in ALONE.get(name, {recipe})
    }
    # Blocks of tokens and of features, of which ranks have whole ones.
    return {
        name: (*KEYS, *keys, *(wide.get(recipe, ()) if ranks > 1 else ()), f"precision.fp8={recipe}")
        for name, keys in found.items()
    }


def trained(world: World, keys: tuple[str, ...]) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses of three steps, parameters and maxima after them, and the bytes of the last one's messages."""
    run = trainer(world, small_deck(*keys))
    losses = [step.loss for step in run.train(2)]
    world.ledger.reset()
    losses += [step.loss for step in run.train(1)]
    states = {f"{each.kind}/{each.shard.name}": each.values for each in run.engine.stage.module_state.state()}
    return losses, run.parameters() | states, sum(entry.bytes for entry in world.ledger.rows())


@pytest.mark.sampled(2)
@pytest.mark.mpi
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_kept_changes_no_bit(world: World, recipe: str) -> None:
    for name, keys in layouts(world.size, recipe).items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(products, "QuantizedMatmul", UnkeptProduct)
            patch.setattr(products, "DelayedMatmul", UnkeptDelayed)
            losses, parameters, most = trained(world, keys)
        local = "layout.sequence_parallel=true" in keys
        for more in ((), ("precision.fp8_messages=true",)) if local else ((),):
            again, others, sent = trained(world, (*keys, *more))
            assert again == losses, name
            for each, values in parameters.items():
                assert torch.equal(others[each], values), (name, each)
            assert sent < most or not local or (name == "cut" and not more)
            most = sent


@pytest.mark.sampled(2)
@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("recipe", RECIPES)
def test_saved_bytes_are_those_predicted(world: World, recipe: str) -> None:
    for name, keys in layouts(world.size, recipe).items():
        if "layout.zero=3" not in keys and name != "frozen":  # what is gathered counts as a parameter
            run = trainer(world, small_deck(*keys))
            assert saved_bytes(run) == predicted(run), name


@pytest.mark.sampled(3)
@pytest.mark.mpi(min_size=1, max_size=1)
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("recipe", ["tensor", "row", "block", "mx"])
def test_a_byte_of_two_is_kept_of_inputs_that_nobody_else_keeps(
    world: World, recipe: str, recompute: str
) -> None:
    """Of two norms, of the last product's input, of attention's output where its core is computed again."""
    deck = small_deck(*KEYS, f"precision.fp8={recipe}", f"memory.recompute={recompute}")
    plain = deck.with_keys(precision={"compute": "bf16", "fp8": "delayed"})
    tokens = deck.batch.micro_size * deck.batch.sequence
    inputs = [deck.model.hidden, deck.model.hidden, deck.model.mlp]
    inputs += [deck.model.hidden] if recompute == "selective" else []
    scales = {
        "tensor": 4 * len(inputs),
        "row": 4 * sum(inputs),
        "block": 4 * sum(inputs) * (tokens // 128),
        "mx": sum(inputs) * (tokens // 32),
    }
    saved = saved_bytes(trainer(world, plain))[0] - saved_bytes(trainer(world, deck))[0]
    assert saved == deck.model.layers * (tokens * sum(inputs) - scales[recipe])


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("recipe", ["tensor", "delayed", "row"])
def test_pieces_of_inputs_travel_in_a_byte_of_two(world: World, recipe: str) -> None:
    """Of each block's two norms and two outputs' gradients; the head's input, the embedding's gradient and
    six numbers of a token's losses stay what they are.
    """
    size = 2 * 64  # tokens of a micro-batch
    for messages in (False, True):
        keys = (*KEYS, *LOCAL, f"precision.fp8={recipe}", f"precision.fp8_messages={str(messages).lower()}")
        run = trainer(world, small_deck(*keys))
        run.train(1)
        world.ledger.reset()
        run.train(1)
        gathered = (e for e in world.ledger.rows() if (e.axis, e.operation) == ("tensor", "all_gather"))
        forward = 64 + (4 if recipe == "row" else 0) if messages else 2 * 64
        gradients = 64 if messages and recipe != "row" else 2 * 64
        a_block = 2 * (forward + 64 + gradients)
        assert sum(e.bytes for e in gathered) == 2 * size * (2 * a_block + 2 * 2 * 64 + 6 * 4)
