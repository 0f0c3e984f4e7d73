"""Decks that go on with fewer ranks, or with more."""

from __future__ import annotations

from hpctrain.deck.check import check_world
from hpctrain.deck.replicas import fit_continued_replicas, fit_initial_replicas
from tests.engines import small_deck

KEYS = ("layout.replicas=4", "communication.local_steps=10", "batch.global_size=48")


def test_a_replica_keeps_its_ranks() -> None:
    deck = small_deck(*KEYS, "layout.tensor=2", "layout.data=4")
    three, sentence = fit_continued_replicas(deck, deck, 8, 6)
    assert (three.layout.replicas, three.layout.data, three.batch.global_size) == (3, 3, 48)
    begun = "6 ranks form 3 replicas instead of layout.local_steps.replicas = 4; each replica "
    assert (
        sentence
        == begun + "continues from the outer model with the optimizer state of one of the 4 earlier ones"
    )
    check_world(three, 6)
    one, _ = fit_continued_replicas(three, three, 6, 2)
    assert one.layout.replicas == 1
    more, _ = fit_continued_replicas(one, one, 2, 12)
    assert (more.layout.replicas, more.batch.global_size) == (6, 48)
    check_world(more, 12)
    # The user's own deck, from which the run once began, follows what the run has become.
    assert fit_continued_replicas(deck, three, 6, 6)[0].layout.replicas == 3
    assert fit_continued_replicas(deck, three, 6, 8) == (deck, "")


def test_a_batch_that_does_not_divide_stays_for_each() -> None:
    deck = small_deck(*KEYS, "batch.global_size=16", "batch.ramp_from=8", "batch.ramp_steps=5")
    three, sentence = fit_continued_replicas(deck, deck, 4, 3)
    assert (three.batch.global_size, three.batch.ramp_from) == (12, 6)
    ramp = "; batch.ramp_from becomes 6, the same for each replica; each replica continues from"
    assert f"; batch.global_size becomes 12, the same for each replica{ramp}" in sentence
    small = ("batch.global_size=12", "batch.ramp_from=3", "batch.ramp_steps=5", "batch.micro_size=1")
    deck = small_deck("layout.replicas=3", "communication.local_steps=4", *small)
    two, sentence = fit_continued_replicas(deck, deck, 3, 2)
    assert (two.batch.global_size, two.batch.ramp_from) == (12, 2)
    assert "global_size" not in sentence
    check_world(three, 3)


def test_what_makes_no_whole_replicas_is_left_to_checks() -> None:
    deck = small_deck(*KEYS, "layout.tensor=2")
    assert fit_continued_replicas(deck, deck, 8, 5) == (deck, "")
    plain = small_deck()
    assert fit_continued_replicas(plain, plain, 2, 1) == (plain, "")
    assert fit_initial_replicas(plain, 3) == (plain, "")


def test_a_run_begins_with_what_the_ranks_can_be_cut_into() -> None:
    deck = small_deck(*KEYS)
    assert fit_initial_replicas(deck, 8) == (deck, "")
    three, sentence = fit_initial_replicas(deck, 3)
    assert (
        three.layout.replicas == 3
        and sentence == "3 ranks form 3 replicas instead of layout.local_steps.replicas = 4"
    )
    assert fit_initial_replicas(deck, 6)[0].layout.replicas == 3
