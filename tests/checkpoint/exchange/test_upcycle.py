"""Mixtures that begin from dense models: they compute the same at first, on every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint.exchange.convert import import_model
from hpctrain.checkpoint.exchange.source import read_source_keys
from hpctrain.checkpoint.exchange.upcycle import dense_entries
from hpctrain.checkpoint.tensor_ranges import TensorRange
from hpctrain.comm.world import World
from hpctrain.deck.read import parse_deck
from hpctrain.engine.build import build_engine
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.errors import HpctrainError
from hpctrain.model.part import logits_of
from hpctrain.parallel.shards import Shard
from hpctrain.train.start import start_from_source
from tests.model.test_against_transformers import qwen3_reference

DECK = """
[run]
steps = 2
[model]
from = "{source}"
experts = 4
[data]
tokens = "none"
[batch]
global_size = 4
sequence = 24
[communication]
bucket_bytes = 20000
"""
TOKENS = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_experts_are_copies_whatever_a_rank_holds_of_them(name: str) -> None:
    torch.manual_seed(0)
    dense = {kind: torch.randn(6, 5) for kind in ("gate", "up")} | {"down": torch.randn(5, 6)}
    stacked = torch.stack((dense["gate"], dense["up"])) if name == "gate_up" else dense["down"]
    whole = stacked.expand(4, *stacked.shape).clone()
    if name == "gate_up":
        start, local = (1, 0, 2, 0), (2, 2, 3, 5)
    else:
        start, local = (1, 0, 2), (2, 5, 3)
    full = f"blocks.0.feed_forward.experts.{name}.weight"
    shard = Shard(full, tuple(whole.shape), start, local)
    expected = shard.take(whole).flatten()
    for first in range(0, shard.elements, 7):
        for last in range(first + 1, shard.elements + 1, 5):
            values = torch.full((last - first,), torch.nan)
            for entry in dense_entries(TensorRange(f"/model/{full}", shard, values, first)):
                kind = entry.dataset.split(".")[-2]
                assert entry.shard.shape == dense[kind].shape
                piece = entry.shard.take(dense[kind]).flatten()
                entry.values.copy_(piece[entry.offset : entry.offset + entry.values.numel()])
            assert torch.equal(values, expected[first:last]), (first, last)


@pytest.mark.sampled(3)
@pytest.mark.mpi(min_size=1, max_size=2)
@pytest.mark.parametrize("kind", ["folder", "checkpoint"])
@pytest.mark.parametrize("layout", ["", "layout.zero=3", "layout.tensor=2", "layout.expert=2"])
def test_the_first_logits_are_those_of_the_dense_model(
    kind: str, layout: str, world: World, mpi_tmp_path: Path
) -> None:
    if world.size == 1 and layout:
        pytest.skip("for 2 ranks")
    torch.manual_seed(3)
    model = qwen3_reference()[0].eval()
    source = mpi_tmp_path / "theirs"
    if world.rank == 0:
        model.save_pretrained(source)
    world.everyone.barrier()
    if kind == "checkpoint":
        import_model(world, source, mpi_tmp_path / "model.h5")
        source = mpi_tmp_path / "model.h5"
    deck = parse_deck(
        DECK.format(source=source), [layout] if layout else [], read_source=read_source_keys, ranks=world.size
    )
    engine = build_engine(deck, world, make_mesh(deck, world))
    told = start_from_source(deck, engine)
    assert told.endswith(", its feed-forward layers copied to 4 experts, with new routers")
    routers = [
        segment.view(bucket.gather_owned(bucket.owned_values))
        for bucket in engine.stage.buckets
        for segment in bucket.segments
        if "router" in segment.parameter.shard.name
    ]
    assert len(routers) == 3 and not torch.equal(routers[0], routers[1])
    with torch.no_grad():
        expected = model(TOKENS).logits
    torch.testing.assert_close(logits_of(engine.model, TOKENS), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "model.experts.router_normalize=false",
            "must be true, because experts start as copies of the feed-forward",
        ),
        ("model.experts.router_scale=2.5", "must be 1, because experts start as copies"),
        ("model.experts.shared=1", "must be 0, because experts start as copies"),
        ("model.experts.mlp=40", "must be model.mlp = 80, because experts start as copies"),
    ],
)
def test_what_would_change_the_first_logits_is_refused(override: str, told: str, tmp_path: Path) -> None:
    qwen3_reference()[0].save_pretrained(tmp_path / "theirs")
    with pytest.raises(HpctrainError) as caught:
        parse_deck(DECK.format(source=tmp_path / "theirs"), [override], read_source=read_source_keys)
    (problem,) = caught.value.problems
    assert problem.startswith(f"--set {override}: {told}")
