"""Tests of deck/reading/deck_input.py: files, included files and `--set` arguments are combined."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.deck.code import resolve_target
from hpctrain.deck.read import parse_deck, read_deck
from hpctrain.deck.schema import fields
from hpctrain.deck.sections.mixture import patterns_in_value
from hpctrain.errors import EXIT_USER, HpctrainError, InputOutputError
from tests.deck.small_text import SMALL, changed, problems


def test_windows_text_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "deck.toml"
    path.write_bytes(
        b"\xef\xbb\xbf" + SMALL.replace("steps = 20", "steps = 0").replace("\n", "\r\n").encode()
    )
    with pytest.raises(HpctrainError, match=r"deck\.toml:2: run\.steps = 0: must be"):
        read_deck(path)


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
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
    with pytest.raises(InputOutputError, match=r"is a directory; .* `hpctrain resume .*` resumes a run"):
        read_deck(tmp_path)
    (tmp_path / "step-00000002.h5").write_bytes(b"\x89HDF")
    with pytest.raises(HpctrainError, match=r"`hpctrain resume .*step-00000002\.h5` resumes from"):
        read_deck(tmp_path / "step-00000002.h5")


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
    (folder / "common" / "base.toml").write_text(changed("tensor = 1", "tensor = 5"))
    (folder / "deck.toml").write_text('include = "common/base.toml"\n[model]\nmlp = 9\ndepth = 2\n')
    with pytest.raises(HpctrainError) as caught:
        read_deck("deck.toml")
    assert caught.value.problems == (
        f"deck.toml:4: model.depth = 2: unknown key; [model] has {', '.join(fields('model'))}",
        "common/base.toml:14: layout.tensor = 5: must divide model.mlp = 9 (use 1 or 3, given model.heads "
        "= 8)",
    )


def test_wrong_includes(folder: Path) -> None:
    (folder / "a.toml").write_text('include = ["b.toml", "c.toml"]\n[run]\nstep = 1\n')
    (folder / "b.toml").write_text('\ninclude = "a.toml"\n')
    with pytest.raises(HpctrainError) as caught:
        read_deck("a.toml")
    assert caught.value.problems == (
        "a.toml:1: include: c.toml: cannot be read: no such file or directory",
        "a.toml:3: run.step = 1: unknown key (did you mean run.steps?)",
        'b.toml:2: include = "a.toml": includes itself (a.toml -> b.toml -> a.toml)',
    )
    (folder / "a.toml").write_text("include = 3\n")
    with pytest.raises(
        HpctrainError, match=r"^a\.toml:1: include = 3: must be a file's name, or a list of names$"
    ):
        read_deck("a.toml")


@pytest.mark.parametrize("name", ["c.toml", "common", "~"])
def test_a_missing_include_or_a_folder_is_a_failure_of_input(folder: Path, name: str) -> None:
    (folder / "a.toml").write_text(f'include = "{name}"\n[run]\nsteps = 1\n')
    with pytest.raises(InputOutputError) as caught:
        read_deck("a.toml")
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("name", ["x" * 300, "\\u0000"])
def test_an_include_that_is_not_a_file_name_is_an_error(folder: Path, name: str) -> None:
    (folder / "a.toml").write_text(f'include = "{name}"\n[run]\nsteps = 1\n')
    with pytest.raises(HpctrainError, match=r"^a\.toml:1: include") as caught:
        read_deck("a.toml")
    assert (caught.value.exit_code, len(caught.value.problems)) == (EXIT_USER, 1)


def test_the_home_folder_in_paths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    (folder / "base.toml").write_text(SMALL)
    (folder / "a.toml").write_text('include = "~/base.toml"\n')
    paths = {"run.dir": "runs", "data.tokens": "t.h5", "model.from": "hf", "memory.offload_dir": "fast"}
    deck = read_deck("a.toml", [f"{key}=~/{path}" for key, path in paths.items()])
    found = deck.run.dir, deck.data.tokens, deck.model.source, deck.memory.offload_dir
    assert found == tuple(f"{folder}/{path}" for path in paths.values())
    deck = read_deck("a.toml", ['data.tokens=["~/a.h5", "b~.h5"]'])
    assert (deck.data.tokens, patterns_in_value("~/c.h5")) == (
        (f"{folder}/a.h5", "b~.h5"),
        (f"{folder}/c.h5",),
    )
    assert resolve_target("~/m.py:f", "x/deck.toml") == f"{folder}/m.py:f"


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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "layout.tensor=16",
            "--set layout.tensor=16: must be at most model.heads = 8 (use 1, 2, 4 or 8, given model.mlp = "
            "256)",
        ),
        ("layout.tensr=3", "--set layout.tensr=3: unknown key (did you mean layout.tensor?)"),
        ("tensor=2", "--set tensor=2: unknown key (did you mean layout.tensor?)"),
        ("lay.tensor=2", "--set lay.tensor=2: unknown section (did you mean [layout]?)"),
        ("include=x.toml", "--set include=x.toml: include is a key of files only"),
        ("batch=2", "--set batch=2: must be written as batch.key=value"),
        (
            "layout=automatic",
            "--set layout=automatic: must be written as layout.key=value, or layout=auto, which "
            "chooses a layout",
        ),
        (
            "layout.tensor",
            "--set layout.tensor: must be written as section.key=value, such as batch.micro_size=4",
        ),
        ("layout.=2", "--set layout.=2: must be written as section.key=value, such as batch.micro_size=4"),
        ("run.steps=a b", "--set run.steps=a b: must be a whole number of at least 1, not text"),
        (
            "layout.a.b=2",
            "--set layout.a.b=2: unknown key; [layout] has auto, data, tensor, context, expert, "
            "expert_tensor, pipeline, schedule, chunks, split, zero, zero_group, "
            "sequence_parallel, context_form, chosen, local_steps",
        ),
    ],
)
def test_wrong_overrides(override: str, message: str) -> None:
    assert problems(SMALL, override)[0] == message


HUGE = 10**30
SINGLE = "not a list of tables (write its name in single brackets, not in [[ ]])"


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (
            f"[optimizer]\nclip = {HUGE}\nclap = 3\n[optimizer.muon]\nmatrices = [{HUGE}]\nmomentum = 2.0\n",
            [
                f"deck.toml:20: optimizer.clip = {HUGE}: must be below 2^63",
                "deck.toml:21: optimizer.clap = 3: unknown key (did you mean optimizer.clip?)",
                f"deck.toml:23: optimizer.muon.matrices = [{HUGE}]: must be below 2^63",
                "deck.toml:24: optimizer.muon.momentum = 2.0: must be a number from 0 to below 1",
            ],
        ),
        (
            f"[model.experts]\ncount = {HUGE}\nper_token = 0\n[other]\nx = {HUGE}\n",
            [
                f"deck.toml:20: model.experts.count = {HUGE}: must be below 2^63",
                "deck.toml:21: model.experts.per_token = 0: must be a whole number from 1 to 100000",
                "deck.toml:22: [other]: unknown section; the sections are",
            ],
        ),
        (
            '"layout.tensor" = 2\n',
            ['deck.toml:19: batch."layout.tensor" = 2: unknown key (did you mean tensor in [layout]?)'],
        ),
        (
            '[layout.local_steps]\nreplicas = 2\n"diloco.momentum" = 0.5\n"a.b" = 1\n',
            [
                'deck.toml:21: layout.local_steps."diloco.momentum" = 0.5: unknown key '
                "(write layout.local_steps.diloco.momentum without quotes)",
                'deck.toml:22: layout.local_steps."a.b" = 1: unknown key',
            ],
        ),
        ('["a.b"]\nc = 1\n', ["deck.toml:19: [a.b]: unknown section; the sections are"]),
        (
            "[[model.experts]]\ncount = 4\n",
            [
                "deck.toml:19: model.experts = [{count = 4}]: must be a table, "
                f'or "none" for no table, {SINGLE}'
            ],
        ),
        (
            "[[optimizer.muon]]\nmomentum = 0.4\n",
            [f"deck.toml:19: optimizer.muon = [{{momentum = 0.4}}]: must be a table, {SINGLE}"],
        ),
        (
            '[layout.x]\n[model.adapters]\n[communication]\nserver = ["async"]\n',
            [
                "deck.toml:19: layout.x = {}: unknown key",
                'deck.toml:22: communication.server = ["async"]: must be a table, or "none" for no '
                "table, not a list",
            ],
        ),
    ],
)
def test_all_problems_have_their_lines(text: str, messages: list[str]) -> None:
    found = problems(SMALL + text)
    assert len(found) == len(messages), found
    for problem, message in zip(found, messages, strict=True):
        assert problem.startswith(message), problem


def test_a_quoted_name_before_all_sections() -> None:
    assert problems(f'"model.layers" = 2\n{SMALL}') == [
        'deck.toml:1: "model.layers" = 2: unknown key (write model.layers without quotes)'
    ]


def test_a_word_in_place_of_a_table_may_only_be_none() -> None:
    assert problems(SMALL, "model.experts=off") == [
        '--set model.experts=off: must be a table, or "none" for no table, not "off"'
    ]


def test_chosen_keys_are_chosen_again() -> None:
    """Of a deck that a run has written: what the user gave stays, but for the whole section."""
    text = changed("[layout]", "[layout]\nzero = 1\nchosen = ['layout.tensor', 'batch.micro_size']")
    text = text.replace("[batch]", "[batch]\nmicro_size = 4")
    for argument, zero in (("layout=auto", 0), ("layout.auto=true", 1)):
        deck = parse_deck(text, [argument])
        assert deck.layout.auto and not deck.layout.chosen
        assert (deck.layout.tensor, deck.batch.micro_size, deck.layout.zero) == (1, 1, zero)
        assert not {"layout.tensor", "batch.micro_size"} & set(deck.sources.places)
    kept = parse_deck(text, ["batch.micro_size=2", "layout=auto"])
    assert kept.batch.micro_size == 2
    assert parse_deck(text).batch.micro_size == 4
