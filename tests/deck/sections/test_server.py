"""What a deck with servers is refused for, and what it asks for in vain without them."""

from __future__ import annotations

import pytest

from hpctrain.deck.check import data_ranks
from hpctrain.errors import HpctrainError
from tests.engines import small_deck

SERVER = "communication.server=async"
SCALE = "communication.staleness_correction=scale"


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (["communication.server_ranks=2"], "has no effect without [communication.server]"),
        (["communication.staleness=3"], "has no effect without [communication.server]"),
        ([SCALE], "has no effect without [communication.server]"),
        ([SERVER, "communication.staleness=3"], 'has no effect without communication.server.mode = "stale"'),
        (
            ["communication.server=sync", SCALE],
            'has no effect without communication.server.mode = "async" or "stale": no gradient is stale',
        ),
        (
            ["communication.server=stale", "communication.staleness=0", SCALE],
            "has no effect with communication.server.staleness = 0: no gradient is stale",
        ),
        (
            [SERVER, "communication.compensation=0.5"],
            'has no effect without communication.server.correction = "compensate"',
        ),
        (
            [SERVER, "communication.compress=sign"],
            'gradients are sent to servers uncompressed (use "none")',
        ),
        ([SERVER, "communication.outer=diloco"], "of their own for local steps (leave it out)"),
        ([SERVER, "layout.zero=1"], "each server already has a shard of all state (use 0)"),
        ([SERVER, "layout.tensor=2"], "a worker is one rank, which has the whole model (use 1)"),
        ([SERVER, "layout.pipeline=2"], "a worker is one rank, which has the whole model (use 1)"),
        ([SERVER, "layout.context=2"], "a worker is one rank, which has the whole model (use 1)"),
        ([SERVER, "memory.optimizer=disk"], '(use "device")'),
        ([SERVER, "checkpoint.mode=background"], '(use "collective")'),
        ([SERVER, "run.trace=true"], "(use false)"),
        ([SERVER, "stability.verify_layout=true"], "(use false)"),
        ([SERVER, "precision.compute=fp16"], '(use "fp32", "bf16" or "fp8")'),
    ],
)
def test_one_sentence_says_what_is_wrong(keys: list[str], sentence: str) -> None:
    with pytest.raises(HpctrainError) as caught:
        small_deck(*keys)
    assert any(sentence in problem for problem in caught.value.problems)


def test_ranks_that_serve_do_not_share_the_batch() -> None:
    deck = small_deck(SERVER, "communication.server_ranks=2", "batch.global_size=12")
    assert data_ranks(deck, 5) == 3
    with pytest.raises(
        HpctrainError, match=r"server_ranks=2: leaves no worker among 2 ranks \(start 3 ranks or more\)"
    ):
        data_ranks(deck, 2)
    with pytest.raises(HpctrainError, match=r"micro_size x data ranks = 2 x 4 = 8 \(use 8 or 16\)"):
        data_ranks(deck, 6)
