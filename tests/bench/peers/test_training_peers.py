"""Which peers can train a deck: what they cannot is told in a sentence, before anything runs."""

from __future__ import annotations

import platform
from importlib import import_module

import pytest

from hpctrain.bench.peers import training_peers
from hpctrain.bench.peers.training_peers import TRAINING_PEERS, peer_problems
from tests.engines import LLAMA, small_deck

DATA, TENSOR, PIPELINE = (), ("layout.tensor=2",), ("layout.pipeline=2", "model.layers=4")
CLEARED = ("family", "layers", "hidden", "heads", "initial_std", "dropout")
MODULE = ("model.module=m.py:f", *(f"model.{key}=" for key in CLEARED))
LATENT = (*LLAMA, "model.key_value_heads=8", "model.latent.key_value_rank=4", "model.latent.rotary_size=2")
OF_AXES = {"data": DATA, "tensor": TENSOR, "pipeline": PIPELINE, "none": (*LLAMA, "model.experts.count=4")}


@pytest.mark.parametrize("name", TRAINING_PEERS)
def test_every_peer_can_train_some_deck(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_peers, "find_spec", lambda _: object())
    axis = TRAINING_PEERS[name].axis
    deck = small_deck("model.dropout=0", *OF_AXES[axis])
    assert peer_problems([name], deck, 1 if axis == "none" else 2, True) == []
    if axis != "none":
        assert callable(import_module(f"hpctrain.bench.peers.{TRAINING_PEERS[name].module}").peer)


@pytest.mark.parametrize(
    ("names", "changes", "ranks", "told"),
    [
        (["ddp", "zero1", "ddp"], DATA, 2, "--against ddp: is given 2 times (give it once)"),
        (["ddp"], DATA, 1, "--against ddp: requires two ranks or more"),
        (["torch-tensor"], DATA, 1, "--against torch-tensor: requires two ranks or more"),
        (["torch-tensor"], DATA, 2, "requires layout.tensor = 2, the number of ranks, not 1"),
        (["fsdp2"], TENSOR, 2, "requires layout.tensor = 1, not 2"),
        (["zero1"], PIPELINE, 2, "requires layout.pipeline = 1, not 2"),
        (["torch-zbv"], DATA, 2, "requires layout.pipeline = 2, the number of ranks, not 1"),
        (["torch-zbv"], ("layout.pipeline=2",), 2, "requires model.layers of at least 4, not 2"),
        (
            ["torch-interleaved"],
            (*PIPELINE, "batch.global_size=6"),
            2,
            "requires a number of micro-batches that is a multiple of the 2 stages, not 3",
        ),
        (["fsdp2"], ("precision.compute=fp16",), 2, "does not support precision.compute"),
        (["ddp-onednn"], ("precision.compute=bf16",), 2, "products in 16 bits always use oneDNN"),
        (
            ["ddp"],
            (*LLAMA, "model.experts.count=4"),
            2,
            "model.experts.count = 4: peers in plain torch support none only",
        ),
        (["ddp"], (*LLAMA, "model.query_key_norm=head"), 2, 'plain torch support "none" only'),
        (["ddp"], LATENT, 2, "model.latent.key_value_rank = 4: peers in plain torch support none only"),
        (["ddp"], ("model.dropout=0.1",), 2, "model.dropout = 0.1: peers in plain torch support 0.0 only"),
        (["ddp"], ("communication.emulate=1 Gbit/s",), 2, "does not delay messages of peers"),
        (["ddp"], ("communication.ranks_per_node=2",), 4, "does not emulate nodes of peers"),
        (["fsdp2"], MODULE, 2, "does not support model.module (use ddp, ddp-kept"),
        (["transformers-eager"], (*LLAMA, "model.experts.count=4"), 2, "requires one rank, not 2"),
    ],
)
def test_what_they_cannot_is_one_sentence(
    names: list[str], changes: tuple[str, ...], ranks: int, told: str
) -> None:
    (sentence,) = peer_problems(names, small_deck("model.dropout=0", *changes), ranks, True)
    assert sentence.startswith("--against ")
    assert told in sentence


def test_what_is_missing_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    deck = small_deck("model.dropout=0")
    monkeypatch.setattr(training_peers, "find_spec", lambda _: None)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    told = peer_problems(["deepspeed-1", "ddp-kept", "ddp"], deck, 2, True)
    assert len(told) == 2
    assert told[0].startswith("--against deepspeed-1: requires DeepSpeed (pip install deepspeed)")
    assert told[1].startswith("--against ddp-kept: requires glibc")
    (told_of_gpus,) = peer_problems(["ddp"], deck, 2, False)
    assert told_of_gpus.endswith('runs on the CPU only (use run.device = "cpu")')
