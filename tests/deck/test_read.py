from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as some
from pydantic import ValidationError

from hpctrain.characters import control_problem
from hpctrain.deck.read import deck_text, parse_deck, read_deck
from hpctrain.deck.schema import Deck, fields, sections
from hpctrain.errors import HpctrainError, InputOutputError

SMALL = """\
[run]
steps = 20

[model]
family = "gpt2"
layers = 2
hidden = 64
heads = 8

[data]
tokens = "tokens.h5"

[layout]
tensor = 1

[batch]
global_size = 8
sequence = 64
"""


def problems(text: str, *overrides: str, ranks: int | None = None) -> list[str]:
    """What `parse_deck` says."""
    with pytest.raises(HpctrainError) as caught:
        parse_deck(text, overrides, ranks=ranks)
    assert caught.value.exit_code == 2
    return list(caught.value.problems)


def changed(line: str, new: str) -> str:
    """The small deck with one line replaced."""
    assert SMALL.count(line + "\n") == 1
    return SMALL.replace(line + "\n", new + "\n")


# What comes out.


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


def test_defaults_that_follow_the_largest_sizes_are_allowed() -> None:
    for family in ("gpt2", "llama"):
        assert parse_deck(SMALL, ["model.hidden=10000000", f"model.family={family}"]).model.mlp > 10**7


def test_sizes_are_read_with_units_and_printed_plain() -> None:
    deck = parse_deck(SMALL + '[communication]\nbucket_bytes = "24 MiB"\n')
    assert deck.communication.bucket_bytes == 24 * 2**20
    assert "bucket_bytes = 25165824\n" in deck_text(deck)


def test_a_key_is_known_by_its_former_name_too() -> None:
    """Decks that checkpoints hold have the names of their time."""
    deck = parse_deck(SMALL + '[machine]\nmemory_per_node = "64 GB"\n')
    assert deck.machine.memory == 64_000_000_000
    assert deck.sources.place("machine.memory").line == 20
    assert parse_deck(SMALL, ["machine.memory_per_node=2 GB"]).machine.memory == 2 * 10**9
    assert "memory_per_node" not in deck_text(deck)


def test_decks_are_frozen_hashable_and_copied_whole() -> None:
    deck = parse_deck(SMALL)
    with pytest.raises(ValidationError):
        deck.run.steps = 3  # type: ignore[misc]
    assert hash(deck) == hash(parse_deck(SMALL))
    assert copy.deepcopy(deck) == deck
    assert deck != parse_deck(SMALL, ["run.steps=21"])


def test_resolved_text_shows_every_key_and_parses_back() -> None:
    deck = parse_deck(SMALL)
    text = deck_text(deck)
    for section in sections():
        part = text[text.index(f"[{section}]\n") :].split("\n[", maxsplit=1)[0]
        for name in fields(section):
            assert f"\n{name} = " in part or f"\n# {name}: " in part or f"\n# {name} = " in part
    assert parse_deck(text, name="other.toml") == deck
    assert "\n# data: fills the rest: 4 on 4 ranks\n" in deck_text(deck, 4)


LINES = some.text(min_size=1, max_size=20).filter(lambda text: not control_problem(text))


@settings(max_examples=60, deadline=None)
@given(
    title=LINES.filter(lambda text: "/" not in text and ".." not in text and text != "."),
    tokens=LINES,
    seed=some.integers(0, 2**63 - 1),
    peak=some.floats(min_value=0, exclude_min=True, allow_infinity=False),
    flops=some.none() | some.floats(min_value=0, exclude_min=True, allow_infinity=False),
    vocabulary=some.none() | some.integers(2, 10**6),
    family=some.sampled_from(["gpt2", "llama"]),
    tied=some.none() | some.booleans(),
)
@example("'#\u00a0é", '"\\', 0, 1e-300, 1e300, None, "gpt2", None)
def test_any_deck_survives_printing(
    title: str,
    tokens: str,
    seed: int,
    peak: float,
    flops: float | None,
    vocabulary: int | None,
    family: str,
    tied: bool | None,
) -> None:
    base = parse_deck(
        SMALL, [f"model.family={family}", *([f"model.tied={str(tied).lower()}"] if tied is not None else [])]
    )
    tree = base.model_dump(by_alias=True)
    tree["run"] |= {"title": title, "seed": seed}
    tree["data"] |= {"tokens": tokens}
    tree["learning_rate"] |= {"peak": peak}
    tree["machine"] |= {"peak_flops": flops}
    tree["model"] |= {"vocabulary": vocabulary}
    deck = Deck.model_validate(tree)
    assert parse_deck(deck_text(deck)) == deck


def test_no_deck_costs_the_import_of_torch_or_mpi() -> None:
    code = (
        "import sys, hpctrain.deck.read, hpctrain.deck.reference;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'mpi4py', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# Wrong keys and values.


@pytest.mark.parametrize(
    ("line", "new", "told"),
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
            "deck.toml:19: batch.steps = 2: unknown key (did you mean run.steps?)",
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
            'deck.toml:5: model.family = "lama": must be "gpt2" or "llama" (did you mean "llama"?)',
        ),
        (
            'tokens = "tokens.h5"',
            "tokens = 5",
            "deck.toml:11: data.tokens = 5: must be text in quotes, not empty, not a number",
        ),
        (
            "tensor = 1",
            "tensor = 1\nsequence_parallel = 1",
            "deck.toml:15: layout.sequence_parallel = 1: must be true or false",
        ),
        (
            "tensor = 1",
            "[model.dropout]\nx = 1",
            "deck.toml:14: model.dropout = {x = 1}: must be a number from 0 to below 1, not a section",
        ),
        (
            "[layout]",
            "[optimizer]\nclip = inf\n[layout]",
            "deck.toml:14: optimizer.clip = inf: must be a number of at least 0",
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
            "deck.toml:14: stability.straggler_factor = 0.9: must be above 1, or 0 to name no rank: half of "
            "all ranks take longer than the median",
        ),
        (
            "[run]",
            "optimizer = 3\n[run]",
            "deck.toml:1: optimizer = 3: must be a section: [optimizer] on a line of its own, with its "
            "keys below",
        ),
    ],
)
def test_one_wrong_key(line: str, new: str, told: str) -> None:
    assert problems(changed(line, new)) == [told]


def test_times_of_a_run() -> None:
    deck = parse_deck(SMALL, ["run.time_limit=1 h 30 min", "run.time_margin=0"])
    assert (deck.run.time_limit, deck.run.time_margin) == (5400.0, 0.0)
    assert parse_deck(deck_text(deck)) == deck
    assert problems(SMALL, "run.time_limit=soon", "run.time_margin=-1") == [
        '--set run.time_limit=soon: must be a time above 0, such as 3000 or "50 min"',
        '--set run.time_margin=-1: must be a time of at least 0, such as 3000 or "50 min"',
    ]
    assert problems(SMALL, "run.time_limit=50 s", "run.time_margin=1 min") == [
        "--set run.time_margin=1 min: must be less than run.time_limit = 50.0"
    ]


def test_missing_keys_are_named_with_their_section() -> None:
    assert problems("[batch]\nmicro_size = 2\n") == [
        "deck.toml:1: batch.global_size is missing: a whole number of at least 1 "
        "(sequences of one optimizer step, over all ranks)",
        "deck.toml: model.preset is missing: name a published shape, or give model.family, layers, "
        "hidden and heads",
        "deck.toml: run.steps is missing: a whole number of at least 1 (optimizer steps of the whole run)",
        "deck.toml: data.tokens is missing: text in quotes, not empty (token file made by `hpctrain "
        "prepare`; "
        "relative to the folder where the run is started)",
    ]


def test_a_missing_part_of_the_shape() -> None:
    assert problems(SMALL.replace("heads = 8\n", "").replace("sequence = 64\n", "")) == [
        "deck.toml:4: model.heads is missing: a whole number from 1 to 10000000, or give model.preset",
        "deck.toml:15: batch.sequence is missing: a whole number from 1 to 1000000000, or give model.preset",
    ]


def test_an_unknown_preset_is_the_only_problem_of_its_model() -> None:
    (told,) = problems(
        '[run]\nsteps=1\n[model]\npreset="gpt2-124M"\n[data]\ntokens="t"\n[batch]\nglobal_size=1\n'
    )
    assert told.startswith('deck.toml:4: model.preset = "gpt2-124M": must be "gpt2-124m", "gpt2-355m"')
    assert told.endswith('(did you mean "gpt2-124m"?)')


def test_all_problems_at_once_in_the_order_of_the_deck() -> None:
    text = """\
[run]
steps = "many"
[model]
family = "gpt2"
layers = 2
hidden = 64
heads = 7
[layout]
tensr = 2
tensor = 1
sequence_parallel = true
[batch]
global_size = 9
micro_size = 2
sequence = 64
"""
    assert problems(text, "batch.ramp_from=3", "optimizer.clip=x") == [
        'deck.toml:2: run.steps = "many": must be a whole number of at least 1, not text',
        "deck.toml:7: model.heads = 7: must divide model.hidden = 64 (1, 2, 4 or 8 would)",
        "deck.toml:9: layout.tensr = 2: unknown key (did you mean layout.tensor?)",
        "deck.toml:11: layout.sequence_parallel = true: splits the sequence over the tensor ranks and so "
        "needs "
        "layout.tensor of at least 2, not 1",
        "deck.toml:13: batch.global_size = 9: must be a multiple of batch.micro_size x data ranks = 2 x "
        "1 = 2 "
        "(8 or 10 would)",
        "deck.toml: data.tokens is missing: text in quotes, not empty (token file made by `hpctrain "
        "prepare`; "
        "relative to the folder where the run is started)",
        "--set batch.ramp_from=3: must be a multiple of batch.micro_size x data ranks = 2 x 1 = 2 (2 or "
        "4 would)",
        "--set batch.ramp_from=3: needs batch.ramp_steps of at least 1",
        "--set optimizer.clip=x: must be a number of at least 0, not text",
    ]


def test_what_follows_from_a_wrong_key_is_not_told() -> None:
    # mlp and so the tensor sizes that would do, and the decay's end, are not known here.
    assert len(problems(changed("hidden = 64", 'hidden = "a"').replace("tensor = 1", "tensor = 3"))) == 1
    assert len(problems(changed("steps = 20", "steps = 0") + "[learning_rate]\nwarmup = 30\n")) == 1
    # A width beyond the largest still gave mlp a valid default; with the width, that default is unknown.
    llama = SMALL.replace('"gpt2"', '"llama"').replace("tensor = 1", "tensor = 2")
    assert len(problems(llama, "model.hidden=12000000")) == 1


def test_a_list_of_whole_numbers_or_a_word() -> None:
    told = 'must be a list of whole numbers or "balanced"'
    assert problems(SMALL, "layout.split=x") == [f"--set layout.split=x: {told}"]
    assert problems(SMALL, "layout.split=3") == [f"--set layout.split=3: {told}"]
    meant = 'did you mean "balanced"?'
    assert problems(SMALL, "layout.split=balance") == [f"--set layout.split=balance: {told} ({meant})"]
    assert problems(SMALL, "layout.split=[1, 1.5]") == [f"--set layout.split=[1, 1.5]: {told}"]


# TOML itself.


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[run]\nsteps = ten\n", "deck.toml:2: not TOML: invalid value (text needs quotes): steps = ten"),
        (
            "[run]\nsteps = 1\n[batch\n",
            'deck.toml:3: not TOML: expected "]" at the end of a table declaration: [batch',
        ),
        ("[run]\nsteps\n", 'deck.toml:2: not TOML: expected "=" after a key in a key/value pair: steps'),
        (
            "[run]\nsteps = 1\ntitle = 'x'\nsteps = 2\n",
            "deck.toml:4: run.steps is given twice, first on line 2",
        ),
        (
            '[run]\ntitle = "a\nsteps = 1\n',
            "deck.toml:2: not TOML: illegal character '\\n' (a quote is not closed): title = \"a",
        ),
        ("run.seed = 1\n[run]\n", "deck.toml:2: run is given twice: [run]"),
        ("[run]\nsteps = 1\n\n[run]\n", "deck.toml:4: run is given twice, first on line 1"),
    ],
)
def test_text_that_is_no_toml(text: str, told: str) -> None:
    found = problems(text)
    assert [sentence.replace("'", '"') for sentence in found] == [told.replace("'", '"')]


def test_an_unfinished_list_names_the_last_line() -> None:
    (told,) = problems("[run]\nsteps = [1,\n2\n")
    assert told.startswith("deck.toml:3: not TOML: ")


def test_windows_text_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "deck.toml"
    path.write_bytes(
        b"\xef\xbb\xbf" + SMALL.replace("steps = 20", "steps = 0").replace("\n", "\r\n").encode()
    )
    with pytest.raises(HpctrainError, match=r"deck\.toml:2: run\.steps = 0: must be"):
        read_deck(path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "deck.toml"
    path.write_bytes(b"[run]\n\xff\xfe")
    with pytest.raises(HpctrainError) as caught:
        read_deck(path)
    assert caught.value.problems == (f"{path}: is not UTF-8 text (byte 6)",)


def test_a_deck_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputOutputError) as caught:
        read_deck(tmp_path / "none.toml")
    assert caught.value.problems == (f"{tmp_path}/none.toml: cannot be read: no such file or directory",)
    assert caught.value.exit_code == 3
    with pytest.raises(InputOutputError, match=r"is a directory; .* `hpctrain resume .*` goes on with a run"):
        read_deck(tmp_path)
    (tmp_path / "step-00000002.h5").write_bytes(b"\x89HDF")
    with pytest.raises(HpctrainError, match=r"`hpctrain resume .*step-00000002\.h5` goes on"):
        read_deck(tmp_path / "step-00000002.h5")


# Included files.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the current one, with a base deck in another."""
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "base.toml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_own_keys_win_over_included_ones(folder: Path) -> None:
    (folder / "deck.toml").write_text(
        'include = "common/base.toml"\n[run]\nsteps = 30\n[batch]\nmicro_size = 2\n'
    )
    deck = read_deck("deck.toml")
    assert (deck.run.steps, deck.batch.micro_size, deck.batch.global_size) == (30, 2, 8)
    assert deck.run.title == "deck"


def test_includes_are_relative_to_their_file_and_later_ones_win(folder: Path) -> None:
    (folder / "common" / "long.toml").write_text('include = ["base.toml"]\n[run]\nsteps = 900\n')
    (folder / "seed.toml").write_text("[run]\nseed = 5\nsteps = 901\n")
    (folder / "deck.toml").write_text('include = ["common/long.toml", "seed.toml"]\n')
    deck = read_deck(folder / "deck.toml")
    assert (deck.run.steps, deck.run.seed) == (901, 5)


def test_problems_name_the_included_file_and_its_line(folder: Path) -> None:
    (folder / "common" / "base.toml").write_text(changed("tensor = 1", "tensor = 3"))
    (folder / "deck.toml").write_text('include = "common/base.toml"\n[model]\nmlp = 9\ndepth = 2\n')
    with pytest.raises(HpctrainError) as caught:
        read_deck("deck.toml")
    assert caught.value.problems == (
        "deck.toml:4: model.depth = 2: unknown key; [model] has preset, from, family, layers, hidden, heads, "
        "key_value_heads, mlp, vocabulary, tied, frozen, dropout, rope_base, norm_epsilon, initial_std",
        "common/base.toml:14: layout.tensor = 3: must divide model.heads = 8 (1 would, given model.mlp = 9)",
    )


def test_circles_and_missing_files_and_wrong_types(folder: Path) -> None:
    (folder / "a.toml").write_text('include = ["b.toml", "c.toml"]\n[run]\nstep = 1\n')
    (folder / "b.toml").write_text('\ninclude = "a.toml"\n')
    with pytest.raises(HpctrainError) as caught:
        read_deck("a.toml")
    assert caught.value.problems == (
        "a.toml:1: include: c.toml: cannot be read: no such file or directory",
        "a.toml:3: run.step = 1: unknown key (did you mean run.steps?)",
        'b.toml:2: include = "a.toml": goes round in a circle (a.toml -> b.toml -> a.toml)',
    )
    (folder / "a.toml").write_text("include = 3\n")
    with pytest.raises(
        HpctrainError, match=r"^a\.toml:1: include = 3: must be a file's name, or a list of names$"
    ):
        read_deck("a.toml")


def test_only_a_missing_include_is_a_failure_of_input(folder: Path) -> None:
    (folder / "a.toml").write_text('include = "c.toml"\n[run]\nsteps = 1\n')
    with pytest.raises(InputOutputError) as caught:
        read_deck("a.toml")
    assert len(caught.value.problems) == 1


# Overrides.


def test_overrides_are_toml_or_bare_text() -> None:
    deck = parse_deck(
        SMALL,
        [
            "run.steps=30",
            "run.title=2024-01-01",
            "data.tokens=some where/x=1.h5",
            'run.dir="quo ted"',
            "model.tied=false",
            "communication.bucket_bytes=2 kB",
            " optimizer.clip = 2",
        ],
    )
    assert (deck.run.steps, deck.run.title, deck.run.dir) == (30, "2024-01-01", "quo ted")
    assert deck.data.tokens == "some where/x=1.h5"
    assert (deck.model.tied, deck.communication.bucket_bytes, deck.optimizer.clip) == (False, 2000, 2.0)


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


def test_of_a_text_with_all_defaults_those_follow_that_have_their_values() -> None:
    whole = deck_text(parse_deck(SMALL)).replace("\n# decay_steps = ", "\ndecay_steps = ")
    whole = whole.replace("\n# warmup = 2 ", "\nwarmup = 7 ").replace("\n# mlp = ", "\nmlp = ")
    deck = parse_deck(whole, ["run.steps=500", "model.hidden=128"], defaults_written=True)
    assert (deck.learning_rate.warmup, deck.learning_rate.decay_steps, deck.model.mlp) == (7, 500, 512)
    kept = parse_deck(whole, ["run.steps=500", "model.hidden=128"])
    assert (kept.learning_rate.decay_steps, kept.model.mlp) == (20, 256)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("layout.tensor=3", "--set layout.tensor=3: must divide model.heads = 8 (1, 2, 4 or 8 would)"),
        ("layout.tensr=3", "--set layout.tensr=3: unknown key (did you mean layout.tensor?)"),
        ("tensor=2", "--set tensor=2: unknown key (did you mean layout.tensor?)"),
        ("lay.tensor=2", "--set lay.tensor=2: unknown section (did you mean [layout]?)"),
        ("include=x.toml", "--set include=x.toml: only a deck can include another, at its top"),
        ("layout=2", "--set layout=2: must be written as layout.key=value"),
        (
            "layout.tensor",
            "--set layout.tensor: must be written as section.key=value, such as batch.micro_size=4",
        ),
        ("layout.=2", "--set layout.=2: must be written as section.key=value, such as batch.micro_size=4"),
        ("run.steps=a b", "--set run.steps=a b: must be a whole number of at least 1, not text"),
        (
            "layout.a.b=2",
            "--set layout.a.b=2: unknown key; [layout] has data, tensor, context, "
            "pipeline, schedule, chunks, split, zero, zero_group, sequence_parallel, context_form",
        ),
    ],
)
def test_wrong_overrides(override: str, told: str) -> None:
    assert problems(SMALL, override)[0] == told


def test_a_preset_set_on_a_resolved_deck_is_refused_as_idle() -> None:
    resolved = deck_text(parse_deck(SMALL, ["model.vocabulary=256"]))
    (told,) = problems(resolved, "model.preset=llama-7b")
    assert told.startswith(
        "--set model.preset=llama-7b: would not change the model, whose family, layers, hidden and heads "
        "are given"
    )
    shaped = SMALL.replace('family = "gpt2"\nlayers = 2\nhidden = 64\nheads = 8\n', "layers = 2\n")
    assert parse_deck(shaped, ["model.preset=gpt2-355m"]).model.layers == 2


def test_keys_of_a_preset_are_told_with_the_line_of_the_preset() -> None:
    text = SMALL.replace(
        'family = "gpt2"\nlayers = 2\nhidden = 64\nheads = 8\n', 'preset = "gpt2-124m"\nhidden = 100\n'
    )
    assert problems(text) == [
        "deck.toml:5: model.heads = 12 (from the preset): must divide model.hidden = 100 (4, 5, 10 or 20 "
        "would)"
    ]
    deck = parse_deck(SMALL)
    assert deck.problem("model.mlp", "is odd") == "deck.toml: model.mlp = 256 (default): is odd"
