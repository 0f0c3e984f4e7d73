"""Tasks that a model is tried on: chances are those of its logits on any layout, what is written is its text.

Tests of post/task.py, post/task_rows.py and train/token_scores.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import hpctrain
from hpctrain.cli.evaluate import command
from hpctrain.comm.world import World
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.errors import HpctrainError, InputOutputError
from hpctrain.generate.generation_model import SamplingOptions
from hpctrain.model.transformer import Transformer
from hpctrain.post.rollout import Answer, AnswerRows
from hpctrain.post.task import Accuracy, ChoiceRows, evaluate_task
from hpctrain.post.task_rows import Choice, WrittenAnswer, read_rows
from tests.engines import LLAMA
from tests.generate.test_text_model import make_checkpoint

LAYOUTS = {
    "data": (),
    "tensor": ("layout.tensor=2", "layout.sequence_parallel=true"),
    "pipeline": ("layout.pipeline=2",),
    "ring": ("layout.context=2",),
    "zero": ("layout.zero=3",),
}
WORDS = ("a", "bb", "xyz", "qrstuv", " ", "0123")
ROWS = [
    {"prompt": "p" * (number % 5) + str(number), "choices": [*WORDS[: 2 + number % 5]], "answer": number % 2}
    for number in range(37)
]
LONG = {
    "prompt": "much longer than the window that the model sees ",
    "choices": ["yes", "no"],
    "answer": "no",
}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tried(world: World, target: Path, *files: Path, overrides: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    shown: list[str] = []
    evaluate_task(world, target, files, overrides, True, shown.append, lambda _: None)
    tasks: list[dict[str, Any]] = world.everyone.broadcast_object(
        json.loads(shown[0])["tasks"] if world.rank == 0 else None
    )
    return tasks


def by_logits(model: hpctrain.GenerationModel, rows: list[dict[str, Any]]) -> tuple[int, int]:
    """How many are right, as a whole and by the byte, choice by choice in double precision."""
    right = by_byte = 0
    for row in rows:
        scores = []
        for choice in row["choices"]:
            ids = [*row["prompt"].encode(), *choice.encode()][-(model.window + 1) :]
            chances = model.logits(ids[:-1]).double().log_softmax(-1)
            own = chances.gather(1, torch.tensor(ids[1:])[:, None])[-len(choice) :]
            scores.append(float(own.sum()))
        answer = row["choices"].index(row["answer"]) if isinstance(row["answer"], str) else row["answer"]
        means = [score / len(choice) for score, choice in zip(scores, row["choices"], strict=True)]
        right += scores.index(max(scores)) == answer
        by_byte += means.index(max(means)) == answer
    return right, by_byte


@pytest.mark.mpi(min_size=2, max_size=2)
def test_choices_are_judged_alike_on_every_layout(world: World, mpi_tmp_path: Path) -> None:
    make_checkpoint(world, path := mpi_tmp_path / "a.h5", *LLAMA)
    rows = [*ROWS, LONG]
    file = mpi_tmp_path / "task.jsonl"
    if world.rank == 0:
        write(file, rows)
    world.everyone.barrier()
    right, by_byte = by_logits(hpctrain.load(path, device="cpu"), rows)
    assert 0 < right < len(rows) and right != by_byte
    for layout in LAYOUTS.values():
        (told,) = tried(world, path, file, overrides=layout)
        assert told["rows"] == len(rows)
        assert (told["accuracy"], told["accuracy_by_byte"]) == (right / len(rows), by_byte / len(rows)), (
            layout
        )


@pytest.mark.mpi(min_size=1, max_size=2)
def test_what_is_written_is_the_models_text(world: World, mpi_tmp_path: Path) -> None:
    def ends_lines(model: Transformer) -> None:
        assert model.table is not None
        model.table.data[ord("\n")] *= 3

    make_checkpoint(world, path := mpi_tmp_path / "a.h5", change=ends_lines)
    model = hpctrain.load(path, device="cpu")
    drawn: SamplingOptions = {"tokens": 64, "temperature": 0.0, "stop": "\n"}
    said = {prompt: model.generate(prompt, **drawn)[1:] for prompt in "abcdefghijklmnopqrstuvwxyz"}
    short = {prompt: text for prompt, text in said.items() if text.strip() and len(text.encode()) < 64}
    prompts, texts = [*short], [*short.values()]
    assert len(prompts) >= 3
    rows: list[dict[str, Any]] = [
        {"prompt": prompts[0], "answer": f"  {texts[0].strip()} "},
        {"prompt": prompts[1], "answer": ["never", texts[1]]},
        {"prompt": prompts[2], "answer": texts[2] + "more"},
    ]
    if world.rank == 0:
        write(mpi_tmp_path / "written.jsonl", rows)
        write(mpi_tmp_path / "chosen.jsonl", ROWS[:3])
    world.everyone.barrier()
    written, chosen = tried(world, path, mpi_tmp_path / "written.jsonl", mpi_tmp_path / "chosen.jsonl")
    assert written["exact_match"] == 2 / 3 and written["rows"] == 3
    assert chosen["rows"] == 3 and "accuracy" in chosen


def test_rows_tell_how_long_they_are(tmp_path: Path) -> None:
    """Of choices, cut ones too, and of answers: what follows is padding, which no mixture counts."""
    rows = [row for row in read_rows(write(tmp_path / "a.jsonl", [*ROWS, LONG])) if isinstance(row, Choice)]
    choices = ChoiceRows(rows[1:5] + rows[-1:], Tokenizer("bytes"), 12, "a.jsonl")
    answers = [Answer(n, 0, (*range(1, 3 + n),), 1, "", "length") for n in range(4)]
    for source in (choices, AnswerRows(answers, 12)):
        for index in range(source.count):
            tokens, targets = source.sequence(index)
            real = source.real_tokens(index)
            assert bool((tokens[:real] > 0).all()) and not tokens[real:].any()
            assert bool((targets[real:] < 0).all())
    assert [choices.real_tokens(index) for index in range(choices.count)][-2:] == [12, 12]


def test_errors_are_those_of_shares() -> None:
    assert (Accuracy(3, 4).share, Accuracy(3, 4).error) == (0.75, pytest.approx((0.75 * 0.25 / 3) ** 0.5))
    assert Accuracy(1, 1).error == 0.0


def test_rows(tmp_path: Path) -> None:
    assert read_rows(write(tmp_path / "a.jsonl", ROWS[:1])) == [Choice("0", ("a", "bb"), 0)]
    assert read_rows(write(tmp_path / "b.jsonl", [LONG]))[0] == Choice(LONG["prompt"], ("yes", "no"), 1)
    assert read_rows(write(tmp_path / "c.jsonl", [{"prompt": "", "answer": ["x", "y"]}])) == [
        WrittenAnswer("", ("x", "y"))
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no rows, such as"),
        ("{", "line 1: is not JSON: {"),
        ("[1]", "line 1: is not an object with a prompt and an answer"),
        ('{"prompt": "a"}', "line 1: is not an object with a prompt and an answer"),
        ('\n{"prompt": 1, "answer": "a"}', "line 2: its prompt must be text"),
        ('{"prompt": "a", "answer": 1}', "its answer must be text"),
        ('{"prompt": "a", "answer": " "}', "its answer is empty"),
        ('{"prompt": "a", "answer": "\\ud800"}', "its answer is not UTF-8 text"),
        ('{"prompt": "a", "choices": ["b"], "answer": 0}', "its choices must be two texts or more"),
        ('{"prompt": "a", "choices": "bc", "answer": 0}', "its choices must be text"),
        ('{"prompt": "a", "choices": ["b", "c"], "answer": 2}', "the number of one, from 0 to 1"),
        ('{"prompt": "a", "choices": ["b", "c"], "answer": true}', "the number of one, from 0 to 1"),
        ('{"prompt": "a", "choices": ["b", "b"], "answer": "b"}', "the number of one, from 0 to 1"),
        (
            '{"prompt": "a", "answer": "b"}\n{"prompt": "a", "choices": ["b", "c"], "answer": 0}',
            "has 1 rows with choices and 1 without: make two files",
        ),
    ],
)
def test_rows_that_will_not_do(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(HpctrainError) as caught:
        read_rows(tmp_path / "a.jsonl")
    assert told in caught.value.problems[0]
    assert caught.value.exit_code == 2


def test_what_a_task_cannot_be_tried_on(world: World, tmp_path: Path) -> None:
    make_checkpoint(world.single_rank_world(), path := tmp_path / "a.h5")
    with pytest.raises(InputOutputError, match="cannot be read"):
        read_rows(tmp_path / "none.jsonl")
    long = write(tmp_path / "long.jsonl", [{"prompt": "a", "choices": ["b" * 33, "c"], "answer": 0}])
    with pytest.raises(
        HpctrainError, match="row 1: a choice has 33 tokens, but the model supports at most 32"
    ):
        tried(world, path, long)
    with pytest.raises(HpctrainError, match="is named twice"):
        tried(world, path, long, long)
    for options in ([], ["--tokens", "a.h5", "--task", "b.jsonl"], ["--task", "b.jsonl", "--sequences", "3"]):
        assert CliRunner().invoke(command, [str(path), *options]).exit_code == 2
