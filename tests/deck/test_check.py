"""What a deck says that cannot be: layouts, ranks, sizes.

Tests of deck/check.py and of deck/sections/batch.py, deck/sections/layout.py,
deck/sections/learning_rate.py, deck/sections/memory.py, deck/sections/run.py and
deck/sections/stability.py.
"""

from __future__ import annotations

import re

import pytest

from hpctrain.deck.check import check_deck, check_world, data_ranks
from hpctrain.deck.problem import divisors, nearest_numbers
from hpctrain.deck.read import parse_deck
from hpctrain.deck.sections.optimizer import MATRIX_OPTIMIZERS, LionTable
from hpctrain.deck.toml_text import deck_text
from hpctrain.errors import HpctrainError

DECK = """\
[run]
steps = 20
[model]
family = "llama"
layers = 2
hidden = 64
heads = 8
key_value_heads = 4
mlp = 96
[data]
tokens = "t.h5"
[batch]
global_size = 8
sequence = 64
"""


def problems(*overrides: str, ranks: int | None = None) -> list[str]:
    """What is said of the deck with these overrides, without "--set"."""
    with pytest.raises(HpctrainError) as caught:
        parse_deck(DECK, overrides, ranks=ranks)
    return [problem.removeprefix("--set ") for problem in caught.value.problems]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["layout.tensor=2"],
        ["layout.tensor=4", "layout.sequence_parallel=true"],
        ["layout.tensor=8"],  # each key/value head is shared by two ranks
        ["layout.context=4"],
        ["layout.context=8", "layout.context_form=all_to_all"],
        ["layout.context=2", "layout.context_form=all_to_all", "layout.tensor=4"],
        ["model.family=gpt2", "model.heads=64", "model.key_value_heads=64"],
        ["model.heads=12", "model.key_value_heads=4", "model.head_size=6", "model.query_key_norm=all"],
        ["batch.ramp_from=4", "batch.ramp_steps=20"],
        ["learning_rate.warmup=30"],  # a trial run may end before
        ["batch.ramp_from=4", "batch.ramp_steps=30"],
        ["learning_rate.decay=constant", "learning_rate.decay_steps=1", "learning_rate.warmup=20"],
        ["run.trace_steps=3"],
        ["run.trace=true", "run.trace_steps=2"],
        ["learning_rate.decay=wsd", "learning_rate.warmup=5", "learning_rate.cooldown=15"],
        ["learning_rate.decay=wsd", "learning_rate.warmup=30"],
        ["learning_rate.decay=inverse-sqrt", "learning_rate.warmup=30"],
        ["communication.transport=nccl", "run.device=cuda"],
        ["model.vocabulary=257", "layout.tensor=2"],  # padded, so it need not divide
        ["memory.recompute=2"],
        ["memory.recompute=sqrt", "layout.pipeline=2"],
    ],
)
def test_what_fits(overrides: list[str]) -> None:
    assert check_deck(parse_deck(DECK, overrides)) == []


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["run.evaluate_every=5", "data.validation=0"],
            [
                "run.evaluate_every=5: requires held-out sequences, but data.validation is 0 (use "
                "data.validation = 0.01, add tables [[evaluation]], or leave this key out)"
            ],
        ),
        (
            ["memory.activations=host", "run.device=cpu"],
            [
                (
                    'memory.activations=host: conflicts with run.device = "cpu": on the CPU the device '
                    'is the host (use "keep" or "disk")'
                )
            ],
        ),
        (
            ["memory.activation_format=bf16", "precision.compute=bf16"],
            [
                (
                    'memory.activation_format=bf16: conflicts with precision.compute = "bf16": '
                    'activations already have 16 bits (use "exact" or "int8")'
                )
            ],
        ),
        (
            ["memory.recompute=0"],
            [
                "memory.recompute=0: must be from 1 to 2, the number of blocks of the longest part of "
                'the model, or "full", "sqrt", "selective" or "none"'
            ],
        ),
        (
            ["memory.recompute=5", "model.layers=5", "layout.pipeline=3"],
            [
                "memory.recompute=5: must be from 1 to 4, the number of blocks of the longest part of "
                'the model, or "full", "sqrt", "selective" or "none"'
            ],
        ),
        (
            ["model.heads=12"],
            ["model.heads=12: must divide model.hidden = 64 (use 2, 4, 8 or 16)"],
        ),
        (
            ["model.heads=64"],
            [
                "model.heads=64: must give an even head size for rotary positions, but model.hidden / "
                "model.heads = 64 / 64 = 1 (use 4, 8, 16 or 32 heads)"
            ],
        ),
        (
            ["model.head_size=7"],
            ["model.head_size=7: must be even for rotary positions (use 8)"],
        ),
        (
            ["model.family=llama", "model.norm_bias=true"],
            ['model.norm_bias=true: requires model.norm = "layer", but it is "rms"'],
        ),
        (
            ["model.key_value_heads=3"],
            ["model.key_value_heads=3: must divide model.heads = 8 (use 1, 2, 4 or 8)"],
        ),
        (
            ["model.family=gpt2", "model.rope_base=500"],
            ['model.rope_base=500: requires model.positions = "rotary", but it is "learned"'],
        ),
        (
            ["layout.tensor=5"],
            ["layout.tensor=5: must divide model.mlp = 96 (use 1, 2, 3, 4, 6 or 8, given model.heads = 8)"],
        ),
        (
            ["layout.tensor=16"],
            [
                "layout.tensor=16: must be at most model.heads = 8 (use 1, 2, 3, 4, 6 or 8, given "
                "model.mlp = 96)"
            ],
        ),
        (
            ["layout.tensor=8", "model.mlp=100"],
            ["layout.tensor=8: must divide model.mlp = 100 (use 1, 2, 4 or 5, given model.heads = 8)"],
        ),
        (
            ["layout.tensor=3", "communication.compress=sign"],
            [
                "communication.compress=sign: conflicts with layout.tensor = 3, which does not divide the "
                'heads evenly: ranks get padding of zeros, which have no signs (use "bf16", "int8", '
                '"topk" or "powersgd")'
            ],
        ),
        (  # what the sequence must be is not told while another size of the axis is needed
            ["layout.tensor=9", "layout.sequence_parallel=true"],
            [
                "layout.tensor=9: must be at most model.heads = 8 (use 1, 2, 4 or 8, given model.mlp = 96 "
                "and batch.sequence = 64)",
                "layout.tensor=9: must divide model.mlp = 96 (use 1, 2, 4 or 8, given model.heads = 8 and "
                "batch.sequence = 64)",
            ],
        ),
        (
            ["layout.context=3", "layout.context_form=all_to_all"],
            [
                "layout.context=3: must divide the 8 heads of a tensor rank with layout.context_form = "
                '"all_to_all" (use 1, 2, 4 or 8, or the form "ring")'
            ],
        ),
        (["layout.zero_group=2"], ["layout.zero_group=2: requires layout.zero = 1, 2 or 3, but it is 0"]),
        (
            ["layout.zero_group=0", "layout.zero=1"],
            ['layout.zero_group=0: must be a number of ranks, 1 or more, or "node"'],
        ),
        (["memory.keep_gathered=1"], ["memory.keep_gathered=1: requires layout.zero = 3, but it is 0"]),
        (
            ["memory.accumulate=sliced"],
            ["memory.accumulate=sliced: requires layout.zero = 2 or 3, but it is 0"],
        ),
        (
            ["layout.sequence_parallel=true"],
            ["layout.sequence_parallel=true: requires layout.tensor above 1, but it is 1"],
        ),
        (
            ["layout.sequence_parallel=true", "layout.tensor=4", "batch.sequence=66"],
            [
                "batch.sequence=66: must be a multiple of layout.context x layout.tensor = 1 x 4 = 4 "
                "with layout.sequence_parallel (use 64 or 68)"
            ],
        ),
        (
            ["layout.context=4", "batch.sequence=100"],
            [
                "batch.sequence=100: must be a multiple of 2 x layout.context = 8, since each context "
                "rank has an early and a late piece (use 96 or 104)"
            ],
        ),
        (
            ["layout.context=4", "batch.sequence=98", "layout.context_form=all_to_all"],
            ["batch.sequence=98: must be a multiple of layout.context = 4 (use 96 or 100)"],
        ),
        (
            ["layout.context=4", "layout.tensor=4", "layout.context_form=all_to_all"],
            [
                "layout.context=4: must divide the 2 heads of a tensor rank with layout.context_form = "
                '"all_to_all" (use 1 or 2, or the form "ring")'
            ],
        ),
        (
            [  # the 4 ranks have 4, 3, 4 and 3 heads, which one key/value head each serves
                *("layout.tensor=4", "model.heads=14", "model.hidden=112", "model.key_value_heads=2"),
                *("layout.context=8", "layout.context_form=all_to_all"),
            ],
            [
                "layout.context=8: must divide the 4 heads of a tensor rank (with padding) with "
                'layout.context_form = "all_to_all" (use 1, 2 or 4, or the form "ring")'
            ],
        ),
        (
            [
                "layout.context=4",
                "model.heads=12",
                "model.key_value_heads=6",
                "model.hidden=72",
                "layout.context_form=all_to_all",
            ],
            [
                "layout.context=4: must divide the 12 heads of a tensor rank, and divide or be a "
                'multiple of its 6 key/value heads, with layout.context_form = "all_to_all" (use 1 or '
                '2, or the form "ring")'
            ],
        ),
        (
            ["batch.micro_size=3"],
            [
                "{deck}batch.global_size = 8: must be a multiple of batch.micro_size x data ranks = 3 x "
                "1 = 3 (use 6 or 9)"
            ],
        ),
        (
            ["batch.micro_size=20"],
            [
                "{deck}batch.global_size = 8: must be a multiple of batch.micro_size x data ranks = 20 "
                "x 1 = 20 (use 20)"
            ],
        ),
        (
            ["batch.ramp_from=16", "batch.ramp_steps=30"],
            [
                ("batch.ramp_from=16: must be at most batch.global_size = 8: the batch grows to that size"),
            ],
        ),
        (
            ["model.initial_std=1e300", "learning_rate.peak=1e308", "optimizer.weight_decay=1e9"],
            [
                "model.initial_std=1e300: must be a number above 0, at most 100",
                "learning_rate.peak=1e308: must be a number above 0, at most 1000",
                "optimizer.weight_decay=1e9: must be a number from 0 to 1000",
            ],
        ),
        (
            ["optimizer.name=lion", "optimizer.epsilon=1e-6", "optimizer.momentum=0.9"],
            [
                'optimizer.epsilon=1e-6: has no effect with optimizer.name = "lion" (leave it out)',
                'optimizer.momentum=0.9: has no effect with optimizer.name = "lion" (leave it out)',
            ],
        ),
        (
            ["optimizer.others_rate=0.1", 'optimizer.matrices=["*"]', "optimizer.nesterov=true"],
            [
                'optimizer.others_rate=0.1: has no effect with optimizer.name = "adamw" (leave it out)',
                'optimizer.matrices=["*"]: has no effect with optimizer.name = "adamw" (leave it out)',
                'optimizer.nesterov=true: has no effect with optimizer.name = "adamw" (leave it out)',
            ],
        ),
        *(
            (
                [f"optimizer.{name}.nesterov=true", f"optimizer.{name}.momentum=0"],
                [
                    f"optimizer.{name}.nesterov=true: requires optimizer.{name}.momentum above 0, "
                    "but it is 0.0"
                ],
            )
            for name in ("sgd", "muon")
        ),
        *(
            (
                [
                    f"optimizer.name={name}",
                    "memory.optimizer=disk",
                    "memory.parameters=disk",
                    "layout.zero=3",
                ],
                [
                    f'memory.{key}=disk: conflicts with optimizer.name = "{name}": it updates '
                    'whole matrices, but offloaded state is updated element by element (use "device")'
                    for key in ("optimizer", "parameters")
                ],
            )
            for name in MATRIX_OPTIMIZERS
        ),
        (
            ["optimizer.name=muon", "memory.parameters=disk", "layout.zero=3"],
            [
                (
                    'memory.parameters=disk: conflicts with optimizer.name = "muon": it updates whole '
                    'matrices, but offloaded state is updated element by element (use "device")'
                )
            ],
        ),
        (
            ["optimizer.name=muon", "optimizer.matrices=[]"],
            ['optimizer.matrices=[]: must name the matrices that Muon updates (use ["blocks.*"])'],
        ),
        (
            ["optimizer.name=sgd", "optimizer.beta2=0.99"],
            ['optimizer.beta2=0.99: has no effect with optimizer.name = "sgd" (leave it out)'],
        ),
        (["batch.ramp_from=4"], ["batch.ramp_from=4: requires batch.ramp_steps above 0, but it is 0"]),
        (["batch.ramp_steps=4"], ["batch.ramp_steps=4: requires batch.ramp_from above 0, but it is 0"]),
        (
            ["learning_rate.warmup=15", "learning_rate.decay_steps=10"],
            ["learning_rate.warmup=15: must be at most learning_rate.decay_steps = 10"],
        ),
        (
            ["learning_rate.decay=wsd", "learning_rate.warmup=5", "learning_rate.cooldown=16"],
            [
                "learning_rate.cooldown=16: must be at most 15, the steps that learning_rate.warmup = 5 "
                "leaves of learning_rate.decay_steps = 20"
            ],
        ),
        (
            ["learning_rate.cooldown=5"],
            [('learning_rate.cooldown=5: has no effect without learning_rate.decay = "wsd" (leave it out)')],
        ),
        (
            ["optimizer.name=schedule-free", "learning_rate.floor=0.5"],
            ['learning_rate.floor=0.5: has no effect with learning_rate.decay = "constant" (leave it out)'],
        ),
        (
            ["run.trace_steps=2"],
            ["run.trace_steps=2: has no effect without run.trace = true (leave it out)"],
        ),
        (
            ["learning_rate.decay=inverse-sqrt", "learning_rate.decay_steps=20", "learning_rate.cooldown=5"],
            [
                'learning_rate.decay_steps=20: has no effect with learning_rate.decay = "inverse-sqrt" '
                "(leave it out)",
                'learning_rate.cooldown=5: has no effect without learning_rate.decay = "wsd" (leave it out)',
            ],
        ),
        (
            ["communication.transport=nccl", "run.device=cpu"],
            [
                (
                    'communication.transport=nccl: conflicts with run.device = "cpu": it connects GPUs '
                    '(use "auto", "shared", "mpi" or "gloo")'
                )
            ],
        ),
        (
            ["communication.transport=shared", "run.device=xpu"],
            [
                (
                    'communication.transport=shared: conflicts with run.device = "xpu": it moves tensors in '
                    'CPU memory only (use "auto", "mpi", "gloo" or "nccl")'
                )
            ],
        ),
    ],
)
def test_what_does_not_fit(overrides: list[str], told: list[str]) -> None:
    assert problems(*overrides) == [sentence.replace("{deck}", "deck.toml:13: ") for sentence in told]


def test_what_another_decay_had_of_its_own_may_stay_in_a_stored_deck() -> None:
    def gone_on(before: str, *changes: str) -> int:
        stored = deck_text(parse_deck(DECK, [f"learning_rate.{key}" for key in before.split()]))
        return parse_deck(stored, changes, includes=False).learning_rate.cooldown

    assert gone_on("decay=wsd cooldown=5 floor=0.5", "learning_rate.decay=constant") == 5
    inverse = "learning_rate.decay=inverse-sqrt"
    assert gone_on("decay_steps=20", inverse) == 0
    with pytest.raises(HpctrainError, match="decay_steps=30: has no effect"):
        gone_on("decay_steps=20", inverse, "learning_rate.decay_steps=30")


def test_what_another_optimizer_had_of_its_own_may_stay_in_a_stored_deck() -> None:
    """As a run goes on with another one (optimizer.restart)."""
    keys = ("name=sgd", "momentum=0.9", "nesterov=true")
    stored, lion = deck_text(parse_deck(DECK, [f"optimizer.{key}" for key in keys])), "optimizer.name=lion"
    assert parse_deck(stored, [lion], includes=False).optimizer.rule == LionTable()
    for name, value in (("momentum", "0.8"), ("nesterov", "true")):
        with pytest.raises(
            HpctrainError, match=f'{name}={value}: has no effect with optimizer.name = "lion"'
        ):
            parse_deck(stored, [lion, f"optimizer.{name}={value}"], includes=False)


@pytest.mark.parametrize(
    ("overrides", "ranks", "told"),
    [
        (
            ["layout.tensor=2", "layout.context=2"],
            6,
            "layout.tensor=2: layout.tensor x layout.context = 2 x 2 must divide the number of ranks, 6 "
            "(4 or 8 ranks would fit)",
        ),
        (
            ["layout.context=4"],
            2,
            "layout.context=4: layout.tensor x layout.context = 1 x 4 must divide the number of ranks, 2 "
            "(4 ranks would fit)",
        ),
        (
            ["layout.data=4", "layout.tensor=2"],
            4,
            "layout.data=4: must be 2, the number of data ranks of 4 ranks with layout.tensor x "
            "layout.context = 2 x 1 (leave the key out, or start 8 ranks)",
        ),
        (
            [],
            3,
            "deck.toml:13: batch.global_size = 8: must be a multiple of batch.micro_size x data ranks = "
            "1 x 3 = 3 (use 6 or 9)",
        ),
        (
            ["batch.ramp_from=2", "batch.ramp_steps=4"],
            4,
            "batch.ramp_from=2: must be a multiple of batch.micro_size x data ranks = 1 x 4 = 4 (use 4)",
        ),
    ],
)
def test_what_does_not_fit_the_world(overrides: list[str], ranks: int, told: str) -> None:
    deck = parse_deck(DECK, overrides)
    with pytest.raises(HpctrainError) as caught:
        check_world(deck, ranks)
    assert [problem.removeprefix("--set ") for problem in caught.value.problems] == [told]
    assert problems(*overrides, ranks=ranks) == [told]
    with pytest.raises(HpctrainError):
        data_ranks(deck, ranks)


def test_the_data_axis_fills_the_rest() -> None:
    deck = parse_deck(DECK, ["layout.tensor=2", "layout.context=2"])
    assert [data_ranks(deck, ranks) for ranks in (4, 8, 32)] == [1, 2, 8]
    assert data_ranks(parse_deck(DECK, ["layout.data=8"]), 8) == 8


def test_a_batch_that_fits_neither_the_deck_nor_the_world_is_told_once() -> None:
    assert len(problems("layout.data=3", ranks=3)) == 1


def test_every_size_named_as_fitting_fits() -> None:
    for heads in (6, 8, 12):
        for shared in divisors(heads):
            model = [
                f"model.heads={heads}",
                "model.hidden=144",
                f"model.key_value_heads={shared}",
                "model.mlp=144",
            ]
            model = [key.replace("144", "64") if heads == 8 else key for key in model]
            for tensor in range(1, 14):
                try:
                    parse_deck(DECK, [*model, f"layout.tensor={tensor}"])
                except HpctrainError as error:
                    told = re.search(r"\(use ([\d, or]+)", error.problems[0])
                    assert told is not None
                    for fitting in re.findall(r"\d+", told[1]):
                        parse_deck(DECK, [*model, f"layout.tensor={fitting}"])


def test_divisors_and_nearest() -> None:
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert divisors(1) == [1]
    assert nearest_numbers(10, divisors(36)) == [4, 6, 9, 12]
    assert nearest_numbers(5, [100], count=4) == [100]


@pytest.mark.parametrize(
    ("overrides", "ranks", "told"),
    [
        (
            ["layout.zero=3"],
            1,
            "layout.zero=3: shards parameters, which requires two ranks or more, "
            "over a single rank (use layout.zero = 0, 1 or 2; the",
        ),
        (
            ["layout.zero=3", "layout.tensor=4"],
            4,
            "layout.zero=3: shards parameters, which requires two ranks or more, over a single rank",
        ),
        (
            ["layout.zero=3", "layout.zero_group=1"],
            4,
            "layout.zero_group=1: shards parameters, which requires two ranks or more, over a single",
        ),
        (
            ["layout.zero=2", "layout.zero_group=3"],
            8,
            "layout.zero_group=3: must divide the 8 data x context ranks (use 1, 2, 4 or 8)",
        ),
    ],
)
def test_groups_of_zero_that_cannot_be(overrides: list[str], ranks: int, told: str) -> None:
    (problem,) = problems(*overrides, ranks=ranks)
    assert problem.startswith(told)


def test_groups_of_zero_that_can_be() -> None:
    for overrides in (["layout.zero=3", "layout.zero_group=2"], ["layout.zero=1"], ["layout.zero=3"]):
        for ranks in (2, 4):
            check_world(parse_deck(DECK, overrides), ranks)


def test_a_stored_deck_may_ask_for_what_never_happens() -> None:
    deck = deck_text(parse_deck(DECK)).replace("evaluate_every = 0", "evaluate_every = 5")
    deck = deck.replace("validation = 0.01", "validation = 0.0")
    assert parse_deck(deck, includes=False).run.evaluate_every == 5
    with pytest.raises(HpctrainError, match=r"deck.toml:\d+: run.evaluate_every = 5: requires held-out"):
        parse_deck(deck)
    with pytest.raises(HpctrainError, match=r"--set run.evaluate_every=4: requires held-out"):
        parse_deck(deck, ["run.evaluate_every=4"], includes=False)


@pytest.mark.parametrize("title", ["../up", "/absolute", "a/b", "..", ".", "a..b", "x" * 201, "é" * 101])
def test_a_title_names_a_folder(title: str) -> None:
    (problem,) = problems(f"run.title={title}")
    assert re.match(r"run\.title=.*: is the name of a folder: must ", problem)


def test_a_title_of_blanks_is_none() -> None:
    with pytest.raises(HpctrainError, match="must not be blank"):
        parse_deck(DECK.replace("steps", 'title = " "\nsteps'))


def test_a_stored_title_has_named_its_folder_already() -> None:
    text = DECK.replace("steps", 'title = "a/b"\ndir = "runs/a/b"\nsteps')
    assert parse_deck(text, includes=False).run.title == "a/b"
    with pytest.raises(HpctrainError, match="name of a folder"):
        parse_deck(text, ["run.title=b/c"], includes=False)


@pytest.mark.parametrize(
    "key", ["run.title", "run.dir", "data.tokens", "memory.offload_dir", "layout.schedule"]
)
@pytest.mark.parametrize("character", ["\n", "\x1b", "\x7f", "\x85", "\u2028"])
def test_texts_have_no_control_characters(key: str, character: str) -> None:
    told = problems(f"{key}=a{character}b")
    assert any("has a control character (U+" in problem for problem in told)
    assert all(problem.isprintable() for problem in told)
    (told_of_list,) = problems(f'model.frozen=["blocks.*", "a\\u{ord(character):04X}"]')
    assert "has a control character" in told_of_list
    (told_of_table,) = problems(f'model.adapters.targets=["a\\u{ord(character):04X}"]')
    assert "has a control character" in told_of_table


def test_what_was_chosen_for_other_ranks() -> None:
    """As where a run with layout = "auto" goes on: who gives a key by hand is told of that key alone."""
    chosen = 'layout.chosen=["layout.tensor"]'
    anew = 'layout = "auto" chose that for other ranks, and --set layout=auto chooses for these'
    text = DECK + "[layout]\ntensor = 2\n"
    for overrides, ranks, told in (
        ((chosen,), 3, True),
        ((), 3, False),
        ((chosen, "layout.tensor=4"), 6, False),
    ):
        with pytest.raises(HpctrainError, match="must divide the number of ranks") as caught:
            parse_deck(text, overrides, ranks=ranks)
        assert caught.value.problems[0].endswith(f"; {anew}") == told
