"""Tests of deck/key_messages.py: messages about wrong keys, sections and values."""

from __future__ import annotations

import pytest

from hpctrain.deck.families import FAMILIES
from hpctrain.deck.sources import toml_value
from hpctrain.text import either
from tests.deck.small_text import SMALL, changed, problems


@pytest.mark.parametrize(
    ("line", "new", "message"),
    [
        (
            "steps = 20",
            "stepz = 20\nsteps = 20",
            "deck.toml:2: run.stepz = 20: unknown key (did you mean run.steps?)",
        ),
        (
            "global_size = 8",
            "global_size = 8\nmicro = 2",
            "deck.toml:18: batch.micro = 2: unknown key (did you mean batch.micro_size?)",
        ),
        (
            "sequence = 64",
            "sequence = 64\nsteps = 2",
            "deck.toml:19: batch.steps = 2: unknown key "
            "(did you mean run.steps or layout.local_steps.steps?)",
        ),
        (
            "sequence = 64",
            "sequence = 64\nweight_decy = 2.0",
            "deck.toml:19: batch.weight_decy = 2.0: unknown key (did you mean optimizer.weight_decay?)",
        ),
        (
            "sequence = 64",
            "sequence = 64\nzzz = [1, {a = true}]",
            "deck.toml:19: batch.zzz = [1, {a = true}]: unknown key; [batch] has global_size, micro_size, "
            "sequence, ramp_from, ramp_steps",
        ),
        (
            "[run]",
            "micro_size = 2\n[run]",
            "deck.toml:1: micro_size = 2: unknown key (did you mean batch.micro_size?)",
        ),
        (
            "[run]",
            "[optimiser]\n[run]",
            "deck.toml:1: [optimiser]: unknown section (did you mean [optimizer]?)",
        ),
        (
            "[run]",
            "[train]\nclip = 1.0\n[run]",
            "deck.toml:1: [train]: unknown section (did you mean optimizer.clip?)",
        ),
        (
            "steps = 20",
            'steps = "20"',
            'deck.toml:2: run.steps = "20": must be a whole number of at least 1, not text (write 20, '
            "without quotes)",
        ),
        (
            "steps = 20",
            "steps = 1e3",
            "deck.toml:2: run.steps = 1000.0: must be a whole number of at least 1 (write 1000)",
        ),
        (
            "steps = 20",
            "steps = 1.5",
            "deck.toml:2: run.steps = 1.5: must be a whole number of at least 1, not a fraction",
        ),
        (
            "steps = 20",
            "steps = true",
            "deck.toml:2: run.steps = true: must be a whole number of at least 1, not true",
        ),
        ("steps = 20", "steps = 0", "deck.toml:2: run.steps = 0: must be a whole number of at least 1"),
        (
            "steps = 20",
            "steps = [1]",
            "deck.toml:2: run.steps = [1]: must be a whole number of at least 1, not a list",
        ),
        (
            "steps = 20",
            "steps = 1979-05-27",
            "deck.toml:2: run.steps = 1979-05-27: must be a whole number of at least 1, not a date or time",
        ),
        (
            'family = "gpt2"',
            'family = "lama"',
            f'deck.toml:5: model.family = "lama": must be {either(map(toml_value, FAMILIES))} '
            '(did you mean "llama"?)',
        ),
        (
            'tokens = "tokens.h5"',
            "tokens = 5",
            "deck.toml:11: data.tokens = 5: must be text in quotes that is not empty, or a list of "
            "texts, not a number",
        ),
        (
            "tensor = 1",
            "tensor = 1\nsequence_parallel = 1",
            "deck.toml:15: layout.sequence_parallel = 1: must be true or false",
        ),
        (
            "[run]",
            '[machine]\ncompile = "on"\n[run]',
            'deck.toml:2: machine.compile = "on": must be true, false or "auto"',
        ),
        (
            "tensor = 1",
            "[model.dropout]\nx = 1",
            "deck.toml:14: model.dropout = {x = 1}: must be a number from 0 to below 1, not a table",
        ),
        (
            "[layout]",
            "[optimizer]\nclip = inf\n[layout]",
            "deck.toml:14: optimizer.clip = inf: must be a number of at least 0, and finite",
        ),
        (
            "[layout]",
            '[communication]\nbucket_bytes = "25 MX"\n[layout]',
            'deck.toml:14: communication.bucket_bytes = "25 MX": must be a size above 0, such as '
            '25000000 or "25 MB"',
        ),
        (
            "[layout]",
            "[stability]\nstraggler_factor = 0.9\n[layout]",
            "deck.toml:14: stability.straggler_factor = 0.9: must be above 1, or 0 to report no rank: "
            "half of the ranks are slower than the median",
        ),
        (
            "[run]",
            "optimizer = 3\n[run]",
            "deck.toml:1: optimizer = 3: must be a section: [optimizer] on a line of its own, with its "
            "keys below",
        ),
        (
            "[run]",
            'policy.weights = ["much"]\n[run]',
            'deck.toml:1: policy.weights = ["much"]: must be a list of numbers',
        ),
    ],
)
def test_one_wrong_key(line: str, new: str, message: str) -> None:
    assert problems(changed(line, new)) == [message]


def test_a_word_for_a_layout_that_is_none() -> None:
    text = "layout = 'automatic'\n" + SMALL.replace("[layout]\ntensor = 1\n", "")
    assert problems(text) == [
        'deck.toml:1: layout = "automatic": must be a section: [layout] on a line of its own, with its keys '
        'below, or layout = "auto", which chooses a layout'
    ]


def test_a_list_of_whole_numbers_or_a_word() -> None:
    message = 'must be a list of whole numbers or "balanced"'
    assert problems(SMALL, "layout.split=x") == [f"--set layout.split=x: {message}"]
    assert problems(SMALL, "layout.split=3") == [f"--set layout.split=3: {message}"]
    meant = 'did you mean "balanced"?'
    assert problems(SMALL, "layout.split=balance") == [f"--set layout.split=balance: {message} ({meant})"]
    assert problems(SMALL, "layout.split=[1, 1.5]") == [f"--set layout.split=[1, 1.5]: {message}"]


@pytest.mark.parametrize(
    ("key", "items"),
    [("policy.stops", "texts in quotes"), ("policy.weights", "numbers"), ("data.mixture", "tables")],
)
def test_a_list_is_described_by_its_items(key: str, items: str) -> None:
    assert problems(SMALL, f"{key}=3") == [f"--set {key}=3: must be a list of {items}"]
