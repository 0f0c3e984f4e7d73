"""The benchmark of training: every peer trains what we do; further variants, one variant alone.

Tests of bench/peers/torch_sharded.py, bench/peers/torch_data.py, bench/peers/torch_tensor.py,
bench/peers/torch_pipeline.py, bench/peers/torch_training.py, bench/peers/peer_process.py and
bench/training_speed.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from statistics import fmean

import pytest

from hpctrain.bench.peers.collective_calls import start_gloo, stop_gloo
from hpctrain.bench.peers.peer_process import PeerProcess
from hpctrain.bench.peers.torch_training import PeerStep
from hpctrain.bench.peers.training_peers import TRAINING_PEERS
from hpctrain.bench.training_speed import TrainingBenchOptions, bench_train, hpctrain_variant
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.deck.one_rank import on_one_rank
from hpctrain.deck.read import parse_deck
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.model.count import count
from hpctrain.model.shape import ModelShape
from tests.engines import DECK, LLAMA, small_deck

ON_DATA = [name for name, peer in TRAINING_PEERS.items() if peer.axis == "data" and peer.same_training]
IN_PIPELINES = [name for name, peer in TRAINING_PEERS.items() if peer.axis == "pipeline"]
CHANGES = (
    *((name, ()) for name in ON_DATA),
    ("ddp", ("precision.compute=bf16", *LLAMA)),
    *((name, ("layout.tensor=2", "model.vocabulary=62")) for name in ("torch-tensor", "torch-sequence")),
    ("torch-tensor", ("layout.tensor=2", "model.vocabulary=62", *LLAMA, "precision.compute=bf16")),
    *((name, ("layout.pipeline=2", "model.layers=4")) for name in IN_PIPELINES),
    ("torch-pipeline", ("layout.pipeline=2", "precision.compute=bf16", *LLAMA)),
)


@contextmanager
def steps_of(name: str, deck: Deck, world: World) -> Iterator[PeerStep]:
    """Those of a peer: in this process, but for what needs one of its own."""
    if name == "ddp-kept" or name.startswith("deepspeed"):
        peer = PeerProcess(name, deck, world, ())
        yield peer.step
        resident, own = peer.memory()
        assert resident > own > 50e6
        peer.close()
        assert peer.process.returncode == 0
        return
    start_gloo(world)
    yield import_module(f"hpctrain.bench.peers.{TRAINING_PEERS[name].module}").peer(name, deck, world, ())
    stop_gloo()


@pytest.mark.sampled(3)
@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(("name", "changes"), CHANGES, ids=lambda part: part if isinstance(part, str) else "")
def test_peers_train_what_one_rank_of_ours_does(world: World, name: str, changes: tuple[str, ...]) -> None:
    """Gradients above the clip, weights that decay, tied tables of gpt2 and a rate that warms up included."""
    if name.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    deck = small_deck("model.dropout=0", "optimizer.clip=0.3", "optimizer.weight_decay=1.0", *changes)
    with steps_of(name, deck, world) as step:
        rows = [world.everyone.all_gather_object(step()) for _ in range(4)]
    losses = [fmean(loss for loss in row if loss is not None) for row in rows]
    alone = world.single_rank_world()
    own = hpctrain_variant("own", on_one_rank(deck), alone, Mesh(alone, {}))
    rounding = 1e-5 if deck.precision.compute == "fp32" else 2e-3
    assert losses == pytest.approx([own.step() for _ in range(4)], rel=rounding)
    assert abs(losses[-1] - losses[0]) > 2 * rounding * losses[0]


@pytest.mark.mpi(min_size=2, max_size=2)
def test_variants_take_turns_and_stand_alone(
    world: World, mpi_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = mpi_tmp_path / "deck.toml", mpi_tmp_path / "figures.json"
    if world.rank == 0:
        path.write_text(DECK)
    world.everyone.barrier()
    wish = TrainingBenchOptions(1, 2, variants=("layout.zero=1", "layout.zero=3 memory.keep_gathered=1"))

    def measured(wish: TrainingBenchOptions) -> list[dict[str, object]]:
        bench_train(world, path, ["model.dropout=0"], wish, output)
        world.everyone.barrier()
        rows: list[dict[str, object]] = json.loads(output.read_text())["rows"]
        world.everyone.barrier()
        return rows

    rows = measured(wish)
    assert [row["name"] for row in rows] == [f"data {world.size}", *wish.variants]
    assert all(row["peak_bytes"] is None for row in rows)
    (row,) = measured(TrainingBenchOptions(1, 1, variants=wish.variants, only="layout.zero=1"))
    assert row["name"] == "layout.zero=1"
    assert isinstance(row["peak_bytes"], int) and row["peak_bytes"] > 50e6
    if world.rank == 0:
        assert "layout.zero=1: peak memory of a rank" in capsys.readouterr().out
    with pytest.raises(HpctrainError, match=r"--only fsdp2: must be deck, layout.zero=1"):
        measured(TrainingBenchOptions(1, 1, variants=wish.variants, only="fsdp2"))
    with pytest.raises(HpctrainError, match=r"layout\.zero"):
        measured(TrainingBenchOptions(1, 1, variants=("layout.zero=7",)))


def test_the_deck_of_the_comparison_is_gpt2() -> None:
    path = Path(__file__).parents[3] / "inputs" / "bench" / "gpt-124m.toml"
    deck = parse_deck(path.read_text(), ())
    assert count(ModelShape.of(deck, deck.model.vocabulary or 0)).parameters == pytest.approx(124e6, rel=0.01)
    assert (deck.batch.sequence, deck.batch.micro_size) == (512, 1)
