"""Defaults that follow other keys, also when a resolved deck is read again."""

from __future__ import annotations

import copy

from hpctrain.deck.code import CodeTrust, Overrides
from hpctrain.deck.read import parse_deck, parse_stored_deck
from hpctrain.deck.sections.optimizer import AdafactorTable, AdamWTable, LionTable, ScheduleFreeTable
from hpctrain.deck.toml_text import deck_text
from tests.deck.small_text import SMALL


def test_defaults_that_follow_other_keys() -> None:
    deck = parse_deck(SMALL, name="some/where.toml")
    assert (deck.run.title, deck.run.dir) == ("where", "runs/where")
    assert (deck.model.key_value_heads, deck.model.mlp, deck.model.tied) == (8, 256, True)
    assert (deck.learning_rate.warmup, deck.learning_rate.decay_steps) == (2, 20)
    assert parse_deck(SMALL, ["run.steps=5000"]).learning_rate.warmup == 100
    assert parse_deck(SMALL, ["run.steps=5000", "learning_rate.decay_steps=50"]).learning_rate.warmup == 5
    assert deck.model.vocabulary is None
    assert deck.layout.data is None
    llama = parse_deck(SMALL, ["model.family=llama", "model.hidden=512"])
    assert (llama.model.mlp, llama.model.tied) == (1536, False)
    assert deck.optimizer.rule == AdamWTable(beta2=0.95)
    assert parse_deck(deck_text(deck), ["optimizer.name=lion"]).optimizer.rule == LionTable(beta2=0.99)
    lion = parse_deck(SMALL, ["optimizer.name=lion", "optimizer.beta2=0.95"])
    assert lion.optimizer.rule == LionTable(beta2=0.95)
    for name, momentum, nesterov in (("sgd", 0.0, False), ("muon", 0.95, True)):
        changed = parse_deck(deck_text(deck), [f"optimizer.name={name}"])
        keys = (changed.value(f"optimizer.{name}.{key}") for key in ("momentum", "nesterov"))
        assert tuple(keys) == (momentum, nesterov)
    muon = parse_deck(SMALL, ["optimizer.name=muon"])
    changed = parse_deck(deck_text(muon), ["optimizer.muon.momentum=0"])
    assert changed.value("optimizer.muon.nesterov") is False
    free = parse_deck(deck_text(deck), ["optimizer.name=schedule-free"])
    assert free.optimizer.rule == ScheduleFreeTable(beta2=0.999)
    assert free.learning_rate.decay == "constant"
    adafactor = parse_deck(deck_text(deck), ["optimizer.name=adafactor"])
    assert adafactor.optimizer.rule == AdafactorTable(beta1=0.0)
    assert parse_deck(deck_text(free), ["optimizer.name=adamw"]).learning_rate.decay == "cosine"


def test_the_last_decay_is_a_tenth_of_what_the_warm_up_leaves_room_for() -> None:
    def cooldown(*keys: str) -> int:
        return parse_deck(SMALL, [f"learning_rate.{key}" for key in keys]).learning_rate.cooldown

    assert [cooldown(f"decay={name}") for name in ("cosine", "linear", "constant", "inverse-sqrt")] == [0] * 4
    assert cooldown("decay=wsd") == 2
    assert cooldown("decay=wsd", "decay_steps=700") == 70
    assert cooldown("decay=wsd", "decay_steps=7") == 1
    assert cooldown("decay=wsd", "warmup=19") == 1
    assert cooldown("decay=wsd", "warmup=30") == 0
    text = deck_text(parse_deck(SMALL, ["learning_rate.decay=wsd"]))
    assert "\n# cooldown = 2  # a tenth of decay_steps (wsd), else 0\n" in text
    assert parse_deck(text, ["run.steps=90"]).learning_rate.cooldown == 9
    assert parse_deck(text, ["run.steps=90", "learning_rate.decay=cosine"]).learning_rate.cooldown == 0


def test_defaults_that_follow_the_largest_sizes_are_allowed() -> None:
    for family in ("gpt2", "llama"):
        assert parse_deck(SMALL, ["model.hidden=10000000", f"model.family={family}"]).model.mlp > 10**7


def test_an_override_without_a_value_puts_the_default_back() -> None:
    resolved = deck_text(parse_deck(SMALL, ["learning_rate.decay_steps=20"]))
    assert parse_deck(resolved, ["run.steps=90"]).learning_rate.decay_steps == 20
    assert (
        parse_deck(resolved, ["run.steps=90", "learning_rate.decay_steps="]).learning_rate.decay_steps == 90
    )


def test_keys_of_a_resolved_deck_that_defaulted_follow_the_others() -> None:
    text = deck_text(parse_deck(SMALL, name="some/where.toml"))
    assert "\n# decay_steps = 20  # run.steps, at least warmup\n" in text
    changes = ["run.steps=500", "run.title=other", "model.hidden=128", "model.heads=4"]
    deck = parse_deck(text, [*changes, "model.layers=4", "layout.pipeline=2", "layout.schedule=interleaved"])
    assert (deck.learning_rate.warmup, deck.learning_rate.decay_steps) == (50, 500)
    assert (deck.run.dir, deck.layout.chunks) == ("runs/other", 2)
    assert (deck.model.key_value_heads, deck.model.mlp) == (4, 512)
    assert parse_deck(deck_text(deck)) == deck
    assert parse_deck(text, ["model.family=llama"]).model.tied is False
    assert parse_deck(text).run.title == "where"  # the file's name is no key


def test_keys_of_a_resolved_deck_that_were_given_stay() -> None:
    given = ["run.dir=runs/where", "learning_rate.warmup=2", "learning_rate.decay_steps=20", "model.mlp=256"]
    text = deck_text(parse_deck(SMALL, given, name="where.toml"))
    deck = parse_deck(text, ["run.steps=500", "run.title=other", "model.hidden=128"])
    assert (deck.learning_rate.warmup, deck.learning_rate.decay_steps) == (2, 20)
    assert (deck.run.dir, deck.model.mlp) == ("runs/where", 256)
    preset = SMALL.replace('family = "gpt2"\nlayers = 2\nhidden = 64\nheads = 8\n', 'preset = "gpt2-124m"\n')
    text = deck_text(parse_deck(preset))
    assert "\nmlp = 3072\n" in text


def test_a_default_that_was_changed_after_reading_is_written() -> None:
    deck = parse_deck(SMALL)
    changed = deck.model_copy(update={"layout": deck.layout.model_copy(update={"chunks": 3})})
    assert "\nchunks = 3\n" in deck_text(changed)
    assert "\n# chunks = 1  # " in deck_text(copy.deepcopy(deck))


def test_values_that_equal_their_defaults_count_as_defaults_in_an_old_checkpoint() -> None:
    whole = deck_text(parse_deck(SMALL)).replace("\n# decay_steps = ", "\ndecay_steps = ")
    whole = whole.replace("\n# warmup = 2 ", "\nwarmup = 7 ").replace("\n# mlp = ", "\nmlp = ")
    overrides = Overrides.of(["run.steps=500", "model.hidden=128"], CodeTrust())
    deck = parse_stored_deck(whole, overrides, "deck.toml", lambda _: {}, (0, 0), defaults_written=True)
    assert (deck.learning_rate.warmup, deck.learning_rate.decay_steps, deck.model.mlp) == (7, 500, 512)
    kept = parse_deck(whole, ["run.steps=500", "model.hidden=128"])
    assert (kept.learning_rate.decay_steps, kept.model.mlp) == (20, 256)
