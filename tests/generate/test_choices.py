"""Penalties, min-p, stop strings and prompts from files, against transformers' processors and plain Python.

Tests of generate/prompts.py, generate/continuation.py and Sampling in generate/sampling.py.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from hpctrain.comm.world import World
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.errors import HpctrainError
from hpctrain.generate.continuation import Continuation
from hpctrain.generate.generate_command import GenerateOptions, generate
from hpctrain.generate.prompts import Prompt, PromptOptions
from hpctrain.generate.sampling import Sampling, apply_repetition_penalty
from tests.generate.test_continuous_batching import continued_by
from tests.generate.test_text_model import GREEDY, make_checkpoint, texts

BYTES = Tokenizer("bytes")


@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.7])
@pytest.mark.parametrize("min_p", [None, 0.0, 0.2, 1.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (20, 0.9)])
def test_chances_are_those_of_transformers(
    penalty: float, min_p: float | None, top_k: int | None, top_p: float | None
) -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    random = torch.Generator().manual_seed(3)
    logits = torch.randn(257, generator=random) * 3
    prompt = torch.randint(257, (30,), generator=random).tolist()
    sampling = Sampling(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty)
    found = sampling.probabilities(apply_repetition_penalty(logits, prompt, penalty).unsqueeze(0))[0]

    scores, ids = logits.double().unsqueeze(0), torch.tensor([prompt])
    wanted = [processors.RepetitionPenaltyLogitsProcessor(penalty)] if penalty != 1 else []
    wanted.append(processors.TemperatureLogitsWarper(0.7))
    wanted += [processors.TopKLogitsWarper(top_k)] if top_k else []
    wanted += [processors.TopPLogitsWarper(top_p)] if top_p else []
    wanted += [processors.MinPLogitsWarper(min_p)] if min_p is not None else []
    for each in wanted:
        scores = each(ids, scores)
    expected = scores.softmax(-1)[0]
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_a_penalty_by_its_definition() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, 0.5])
    assert apply_repetition_penalty(logits, [0, 1, 0], 2.0).tolist() == [1.0, -4.0, 1.0, 0.5]
    assert apply_repetition_penalty(logits, [0, 1, 0, 3], 2.0).tolist() == [1.0, -4.0, 1.0, 0.25]
    assert apply_repetition_penalty(logits, [9, 0], 2.0).tolist() == [1.0, -2.0, 1.0, 0.5]
    assert logits.tolist() == [2.0, -2.0, 1.0, 0.5]
    assert torch.equal(apply_repetition_penalty(logits, [0], 1.0), logits)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_a_penalty_counts_prompt_and_text(world: World) -> None:
    def same(_: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(1, BYTES.vocabulary)
        logits[0, :3] = torch.tensor([3.0, 2.9, 2.8])
        return logits

    sampling = Sampling(tokens=4, temperature=0.0, repetition_penalty=1.5)
    assert continued_by(same, [[0]], sampling, world.everyone) == [[1, 2, 0, 0]]


def continued(pieces: Sequence[int], stops: Sequence[str]) -> tuple[str, str, list[str]]:
    """Text of bytes one after another, why it ended, and what was to be shown meanwhile."""
    sample, shown = Continuation(BYTES, BYTES.encode("prompt"), stops), []
    for byte in pieces:
        ended = sample.add(byte)
        shown.append(sample.text)
        if ended:
            break
    return sample.finish(), sample.finish_reason, shown


@settings(max_examples=200, deadline=None)
@given(
    text=some.text(alphabet="ab\u00e9\n", max_size=30),
    stops=some.lists(some.text(alphabet="ab\u00e9\n", min_size=1, max_size=4), max_size=3),
)
def test_a_text_ends_before_the_first_stop(text: str, stops: list[str]) -> None:
    found, why, shown = continued(list(text.encode()), stops)
    # The stop that is whole first ends it, before where it begins; of several that are, the earliest.
    ends = sorted({end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)})
    if ends:
        starts = [text[: ends[0]].index(stop) for stop in stops if stop in text[: ends[0]]]
        assert (found, why) == (text[: min(starts)], "stop")
    else:
        assert (found, why) == (text, "length")
    assert all(found.startswith(each) for each in shown)


def test_an_end_of_document_ends_a_text() -> None:
    assert continued([*b"abc", BYTES.end_of_document, *b"d"], ["cd"])[:2] == ("abc", "end")
    assert continued([*b"ab", 0xC3], [])[:2] == ("ab\N{REPLACEMENT CHARACTER}", "length")
    assert Continuation(BYTES, BYTES.encode("x\N{REPLACEMENT CHARACTER}"), ()).prompt_text == "x\ufffd"


@pytest.mark.mpi(min_size=1, max_size=2)
def test_lines_of_json_come_and_go(world: World, mpi_tmp_path: Path) -> None:
    path = mpi_tmp_path / "step-00000001.h5"
    make_checkpoint(world, path)
    lines = ['{"prompt": "ab", "id": 7}', "", '"cd"', "{}"]
    if world.rank == 0:
        (mpi_tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    world.everyone.barrier()
    shown: list[str] = []
    source = PromptOptions(json_lines=str(mpi_tmp_path / "prompts.jsonl"))
    options = GenerateOptions(source, Sampling(tokens=5, temperature=0.0))
    generate(world, path, options, shown.append, live=True)
    alone = [texts(world, path, prompt, Sampling(tokens=5, temperature=0.0)) for prompt in ("ab", "cd", "")]
    two: list[str] = []
    options = GenerateOptions(source, Sampling(tokens=3, seed=1, samples=2, stops=("a",)))
    generate(world, path, options, two.append, live=False)
    if world.rank == 0:
        rows = [json.loads(line) for line in shown]
        assert [row["prompt"] for row in rows] == ["ab", "cd", ""]
        assert rows[0]["id"] == 7
        assert [[row["prompt"] + row["text"] + "\n"] for row in rows] == alone
        assert all(row["ended"] in {"length", "end"} and row["tokens"] <= 5 for row in rows)
        assert [json.loads(line)["sample"] for line in two] == [1, 2] * 3
        assert not any("a" in json.loads(line)["text"] for line in two)


@pytest.mark.mpi(min_size=1, max_size=2)
def test_shown_as_it_grows_a_stop_is_never_seen(world: World, mpi_tmp_path: Path) -> None:
    path = mpi_tmp_path / "step-00000001.h5"
    make_checkpoint(world, path)
    [whole] = world.everyone.broadcast_object(texts(world, path, "ab", GREEDY))
    stop = whole[2:][6:9]
    live = "".join(texts(world, path, "ab", Sampling(**(vars(GREEDY) | {"stops": (stop,)})), live=True))
    batch = "".join(texts(world, path, "ab", Sampling(**(vars(GREEDY) | {"stops": (stop,)}))))
    if world.rank == 0:
        assert live == batch == whole[: 2 + whole[2:].index(stop)] + "\n"


def test_prompts_of_files_and_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert PromptOptions().read() == [Prompt("")]
    assert PromptOptions("x").read() == [Prompt("x")]
    (tmp_path / "a.txt").write_text("two\nlines\n\n")
    assert PromptOptions(file=str(tmp_path / "a.txt")).read() == [Prompt("two\nlines\n")]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("grün\n".encode())))
    assert PromptOptions(file="-").read() == [Prompt("grün")]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "a", "n": 1}\n"b"\n')))
    assert PromptOptions(json_lines="-").read() == [Prompt("a", {"n": 1}), Prompt("b")]


def test_what_is_no_prompt(tmp_path: Path) -> None:
    def told(content: bytes, **given: str) -> tuple[str, ...]:
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(HpctrainError) as caught:
            PromptOptions(**{name: str(tmp_path / "x") for name in given}).read()
        return tuple(problem.replace(str(tmp_path), "") for problem in caught.value.problems)

    assert told(b"", file="") == ("--prompt-file /x: is empty; leave it out to start a document",)
    assert told(b"\n", file="") == ("--prompt-file /x: is empty; leave it out to start a document",)
    assert told(b"a\xff", file="") == ("--prompt-file /x: is not UTF-8 text (byte 1)",)
    assert told(b"\n", json_lines="") == (
        '--json-lines /x: has no prompts (expected lines such as {"prompt": "..."})',
    )
    assert told(b'{"prompt": ""}\nabc\n3\n{"prompt": null}\n[1]', json_lines="") == (
        '--json-lines /x, line 1: its prompt is empty; leave "prompt" out to start a document',
        '--json-lines /x, line 2: is not JSON: abc (expected {"prompt": "..."})',
        '--json-lines /x, line 3: must be a string, or an object with a string "prompt"',
        '--json-lines /x, line 4: must be a string, or an object with a string "prompt"',
        '--json-lines /x, line 5: must be a string, or an object with a string "prompt"',
    )
    lines = b'{"text": "a"}\n{"prompt": "a", "text": "b"}\n{"tokens": 3}\n{"prompt": "a\\ud800b"}\n'
    assert told(lines, json_lines="") == (
        '--json-lines /x, line 1: has a "text" but no "prompt" (expected {"prompt": "..."})',
        '--json-lines /x, line 2: has the key "text", which is reserved for the output; rename it',
        '--json-lines /x, line 3: has the key "tokens", which is reserved for the output; rename it',
        "--json-lines /x, line 4: its prompt is not UTF-8 text (byte 1)",
    )
    with pytest.raises(HpctrainError, match=r"^--prompt: is not UTF-8 text \(byte 5\)$"):
        PromptOptions(os.fsdecode("groß".encode() + b"\xff")).read()
    with pytest.raises(HpctrainError, match=r"^--stop: is not UTF-8 text \(byte 1\)$"):
        Sampling(stops=("a\ud800",)).check()
    assert told(b"x", file="", json_lines="") == ("--prompt-file and --json-lines conflict with each other",)
    with pytest.raises(HpctrainError, match="cannot be read \\(No such file or directory\\)"):
        PromptOptions(file=str(tmp_path / "none")).read()


def test_options_out_of_range() -> None:
    wrong = Sampling(min_p=math.nan, repetition_penalty=math.nan, stops=("a", ""))
    with pytest.raises(HpctrainError) as caught:
        wrong.check()
    assert caught.value.problems == (
        "--min-p nan: must be from 0 (all tokens) to 1 (the most likely token)",
        "--repetition-penalty nan: must be above 0 (1 has no effect, 1.2 penalizes tokens of the text)",
        "--stop: must not be empty",
    )
    for penalty in (0.0, -1.0, math.inf):
        with pytest.raises(HpctrainError, match="--repetition-penalty"):
            Sampling(repetition_penalty=penalty).check()
    Sampling(min_p=0.0, repetition_penalty=0.5, stops=("\n",)).check()
