"""What completions are worth: scores of functions in processes, and every failure of these in a sentence.

Tests of post/rewards/reward_interface.py, post/rewards/rewards.py, post/rewards/process_rewards.py,
post/rewards/worker_processes.py, post/rewards/reward_worker.py, host/child_process.py and
host/process_lifetime.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpctrain.comm.world import World
from hpctrain.deck.code import NamedCode
from hpctrain.errors import HpctrainError, UserCodeError
from hpctrain.host import child_process
from hpctrain.post.rewards.process_rewards import RegularExpression, UserReward
from hpctrain.post.rewards.reward_interface import ExactMatch, Reward, Sample
from hpctrain.post.rewards.rewards import Rewards, open_rewards, parse_reward, score_on_all_ranks

JUDGES = Path(__file__).with_name("judges.py")


def samples_of(texts: Sequence[str], **others: object) -> list[Sample]:
    return [Sample(f"prompt {n}", each, others, n // 4, n % 4 + 1, len(each)) for n, each in enumerate(texts)]


def scores_of(function: str, texts: Sequence[str], seconds: float = 20.0, **others: object) -> list[float]:
    reward = UserReward(NamedCode(f"{JUDGES}:{function}"), seconds)
    try:
        return reward.scores(samples_of(texts, **others))
    finally:
        reward.close()


def sentence_of(reward: Reward, samples: Sequence[Sample]) -> str:
    """What its error says, one sentence; no process is left."""
    try:
        with pytest.raises(HpctrainError) as raised:
            reward.scores(samples)
        (sentence,) = raised.value.problems
        assert "\n" not in sentence
        return sentence
    finally:
        reward.close()


def test_functions_of_users_judge_as_they_are() -> None:
    texts = ["a", "bb", "ccc", "", "é\n\udc80"]
    assert scores_of("length", texts) == [1, 2, 3, 0, 3]
    assert scores_of("correct", texts, answer="bb") == [0, 1, 0, 0, 0]
    assert scores_of("later", texts, unused=1) == [0.25] * 5
    assert scores_of("as_array", texts) == [0.5, 1, 1.5, 0, 1.5]
    assert scores_of("length", ["x" * 5_000_000] * 2) == [5e6, 5e6]
    assert scores_of("takes_out", texts) == scores_of("length", texts)


def test_a_function_that_comes_back_twice_is_heard_once() -> None:
    reward = UserReward(NamedCode(f"{JUDGES}:twice"), 20.0)
    try:
        for _ in range(5):
            assert reward.scores(samples_of(["a", "b"])) == [1.0, 1.0]
    finally:
        reward.close()


def test_what_a_function_forks_can_be_ended() -> None:
    assert scores_of("forks_and_ends", ["a", "b"]) == [-signal.SIGTERM] * 2


def test_batches_are_shared_by_processes_in_order() -> None:
    texts = ["x" * (n % 7) for n in range(101)]
    reward = UserReward(NamedCode(f"{JUDGES}:length"), processes=3, batch_size=4)
    assert reward.scores([]) == []
    assert reward.scores(samples_of(texts)) == [*map(len, texts)]
    assert reward.scores(samples_of(texts[:1])) == [0]
    reward.close()
    assert reward.scores(samples_of(texts)) == [*map(len, texts)]
    reward.close()
    processes = UserReward(NamedCode(f"{JUDGES}:process"), processes=2, batch_size=1)
    known = {*processes.scores(samples_of(texts))} - {os.getpid()}
    assert len(known) == 2 and known == {*processes.scores(samples_of(texts))}
    processes.close()


def test_what_a_function_prints_is_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    assert scores_of("says", ["a"]) == [0.0]
    printed = capfd.readouterr()
    assert not printed.out and "said by a function\n" in printed.err and "written by a" in printed.err


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("raises", f"fails: KeyError: 'no such thing\\nhere' ({JUDGES}, line "),
        ("leaves", "fails: SystemExit: enough ("),
        ("out_of_memory", "fails: MemoryError ("),
        ("exits", "fails, since its process ended by itself, with exit code 3, called"),
        (
            "killed",
            "fails, since its process was killed (signal 9), possibly because memory ran out: use fewer",
        ),
        ("crashes", "fails, since its process was ended by signal 11, called"),
        ("hangs", "takes longer than 1 s, called"),
        ("spins", "takes longer than 1 s, called"),
        ("nan", "returns NaN, called"),
        ("infinite", "returns -inf, called"),
        ("huge", "returns 1e+308, whose magnitude exceeds 1e+30, called"),
        ("none", "returns None, which is not a number (return 0.0 if there is no score), called"),
        ("text", 'returns a str: "high", which is not a number, called'),
        (
            "writes_everywhere",
            'writes "a line of a function\\n" to a file descriptor that it has not opened, through '
            "which hpctrain receives answers; it may write only to stdout, stderr and files "
            "that it has opened itself, called",
        ),
        (
            "writes_nested_lists",
            f'writes "{"[" * 40}" to a file descriptor that it has not opened, through',
        ),
        ("writes_to_three", f"fails: OSError: [Errno 9] Bad file descriptor ({JUDGES}, line "),
        ("closes_everything", "fails, since its process ended by itself, with exit code 0, called"),
        ("one_number", "returns a float, not a list with a number for each completion, called"),
    ],
)
def test_what_fails_is_told_with_the_sample(function: str, what: str) -> None:
    samples = samples_of(["good"] * 6 + ["bad"] + ["good"] * 3)
    told = sentence_of(
        UserReward(NamedCode(f"{JUDGES}:{function}"), 1.0 if what.startswith("takes") else 20.0), samples
    )
    assert told.startswith(f"judges.py:{function} {what}"), told
    one = 'sample 1 of prompt 0 (prompt "prompt 0", completion "good")'
    bad = 'sample 3 of prompt 1 (prompt "prompt 6", completion "bad")'
    assert told.endswith(f"called with {one if function == 'one_number' else bad}"), told


def test_the_sample_is_told_on_one_line_and_clipped() -> None:
    samples = [Sample("p" * 10_000, "bad"), Sample('"quoted"\x1b[2J\u202e', "bad", {}, 5, 2)]
    told = sentence_of(UserReward(NamedCode(f"{JUDGES}:nan")), samples[1:])
    assert r'sample 2 of prompt 5 (prompt "\"quoted\"\u001b[2J\u202E", completion "bad")' in told
    assert len(sentence_of(UserReward(NamedCode(f"{JUDGES}:nan")), samples[:1])) < 400


def test_what_fails_with_several_samples_alone_is_told_so() -> None:
    several = samples_of(["good"] * 5)
    told = sentence_of(UserReward(NamedCode(f"{JUDGES}:not_at_once")), several)
    assert "fails: ValueError: one by one, please" in told
    assert "called with sample 1 of prompt 0 to sample 1 of prompt 1" in told
    assert told.endswith("at once, but not with any of these 5 alone")
    assert "returns 1 value for 5 completions" in sentence_of(
        UserReward(NamedCode(f"{JUDGES}:too_few")), several
    )
    assert "returns 0 values for 1 completion," in sentence_of(
        UserReward(NamedCode(f"{JUDGES}:leaves_out")), several
    )
    began = time.monotonic()
    told = sentence_of(UserReward(NamedCode(f"{JUDGES}:slow"), 1.0), samples_of(["good"] * 16))
    assert told.startswith("judges.py:slow takes longer than 1 s, called with sample 1 of prompt 0 to ")
    assert " of 16 one by one took 1" in told and time.monotonic() - began < 30


def test_it_is_not_started_where_it_cannot_judge(tmp_path: Path) -> None:
    for name, what in (
        (
            "of_text",
            "judges.py:of_text has no argument completions, but text, label: it is called as function(",
        ),
        ("lenght", f"{JUDGES} has no lenght (did you mean length?)"),
        ("JUDGES", f"{JUDGES} has no JUDGES"),
    ):
        with pytest.raises(UserCodeError) as raised:
            UserReward(NamedCode(f"{JUDGES}:{name}")).start()
        assert raised.value.problems[0].startswith(what) and len(raised.value.problems) == 1
    told = sentence_of(UserReward(NamedCode(f"{JUDGES}:with_solution")), samples_of(["a"], answer="a"))
    assert told.startswith("judges.py:with_solution requires solution, which no row has (rows have answer)")
    for content, what in (("x = 1 / 0\n", "division by zero"), ("x = (\n", "SyntaxError"), ("exit(4)", "4")):
        (own := tmp_path / "own.py").write_text(content)
        with pytest.raises(UserCodeError, match=r"own\.py fails to load|it ends the process") as raised:
            UserReward(NamedCode(f"{own}:f")).start()
        assert what in str(raised.value) and len(raised.value.problems) == 1
    own.write_text("import os\nos._exit(5)\n")
    told = r"^own.py:f fails, since its process .* code 5, while loading$"
    with pytest.raises(UserCodeError, match=told):
        UserReward(NamedCode(f"{own}:f")).start()


def test_exact_match_and_patterns() -> None:
    texts = [" 42\n", "41", "it is 42.", ""]
    exact = ExactMatch()
    assert exact.scores(samples_of(texts, answer="42 ")) == [1, 0, 0, 0]
    assert ExactMatch("right").scores(samples_of(texts, right=["41", "42"])) == [1, 1, 0, 0]
    told = sentence_of(exact, samples_of(["a"], solution="a"))
    assert told.startswith(
        'exact-match: the row of prompt 0 ("prompt 0") has no "answer", which exact-match requires'
    )
    assert "has an int as its" in sentence_of(exact, samples_of(["a"], answer=42))
    for pattern, others, wanted in (
        ("[0-9]+", {}, [1, 1, 1, 0]),
        (r"is ([0-9]+)\.", {"answer": "42"}, [0, 0, 1, 0]),
        (r"is ([0-9]+)\.", {"answer": "41"}, [0, 0, 0, 0]),
        (r"is ([0-9]+)\.", {}, [0, 0, 1, 0]),
        (r"41|([0-9]+)", {"answer": ["42", "43"]}, [1, 0, 1, 0]),
    ):
        reward = RegularExpression(pattern)
        assert reward.scores(samples_of(texts, **others)) == wanted, pattern
        reward.close()
    endless = [Sample("p", "a"), Sample("p", "a" * 60 + "b", {}, 3, 2)]
    told = sentence_of(RegularExpression("^(a+)+$", seconds=1.0), endless)
    assert told.startswith("regular-expression takes longer than 1 s, called with sample 2 of prompt 3 (")
    assert "has an int as its" in sentence_of(RegularExpression("(x)"), samples_of(["a"], answer=42))


def test_names_of_rewards(tmp_path: Path) -> None:
    assert isinstance(parse_reward(NamedCode("exact-match"), "deck").open(), ExactMatch)
    assert isinstance(parse_reward(NamedCode("regular-expression:a:(b)"), "deck").open(), RegularExpression)
    assert isinstance(parse_reward(NamedCode(f"{JUDGES}:length"), "deck").open(), UserReward)
    assert isinstance(parse_reward(NamedCode("torch:tensor"), "deck").open(), UserReward)
    for text, what in (
        ("regular-expression:(", r'"\(" is not a regular expression \(missing \), unterminated subpattern'),
        ("regular-expression:", "requires a pattern"),
        ("regular-expression", "requires a pattern"),
        ("exact-match:b", r'has an argument \(expected "exact-match"\)'),
        ("exact_match", r"is not a reward \(did you mean exact-match\?\)"),
        ("", "is not a reward"),
        (f"{tmp_path}/none.py:f", "none.py: file does not exist$"),
        ("no_such_package:f", 'package "no_such_package" is not installed'),
        ("file.py:", "is not a reward"),
    ):
        with pytest.raises(HpctrainError, match=rf"^deck\.toml:3: .*{what}"):
            parse_reward(NamedCode(text), "deck.toml:3")


def test_weighted_sums() -> None:
    length = UserReward(NamedCode(f"{JUDGES}:length"))
    rewards = Rewards([(length, 0.5), (ExactMatch(), 1), (ExactMatch("other"), -1.0)])
    scores = rewards.scores(samples_of(["aa", "b", "ccc"], answer="aa", other="b"))
    assert scores.parts == {"length": [2, 1, 3], "exact_match": [1, 0, 0], "exact_match_2": [0, 1, 0]}
    assert scores.totals == [2.0, -0.5, 1.5]
    assert scores.mean_rewards() == pytest.approx(
        {"reward": 1, "reward_length": 2, "reward_exact_match": 1 / 3, "reward_exact_match_2": 1 / 3}
    )
    rewards.close()
    with pytest.raises(HpctrainError, match=r'^rows\.jsonl:4 has no "answer", .* \(it has "other"\)$'):
        rewards.check({"other": "b"}, "rows.jsonl:4")
    with pytest.raises(HpctrainError, match=r'^rows\.jsonl:4 has "tokens", which conflicts with an argument'):
        rewards.check({"answer": "a", "other": "b", "tokens": 1}, "rows.jsonl:4")


def test_names_that_others_have_get_a_number() -> None:
    """As those of reward models, and of the deviation of all rewards, which figures are called by."""
    names = [f"{JUDGES}:{name}" for name in ("length", "model", "deviation")]
    rewards = open_rewards(
        {NamedCode(name): 1.0 for name in names}, "post.rewards", reserved_names=["model", "model_2"]
    )
    assert rewards.names == ["length", "model_3", "deviation_2"]


def test_rewards_are_opened_by_their_texts() -> None:
    rewards = open_rewards(
        {NamedCode(f"{JUDGES}:length"): 2.0, NamedCode("regular-expression:a"): -1.0}, "post.rewards"
    )
    rewards.start()
    assert rewards.scores(samples_of(["a", "bb"])).totals == [1.0, 4.0]
    rewards.close()
    with pytest.raises(HpctrainError) as raised:
        open_rewards(
            {
                NamedCode("exact"): 1.0,
                NamedCode("regular-expression:("): 1.0,
                NamedCode("exact-match"): float("nan"),
            },
            "post.rewards",
        )
    assert len(raised.value.problems) == 3
    with pytest.raises(HpctrainError, match=r"^post\.rewards: names no reward: "):
        open_rewards({}, "post.rewards")


def gone(pid: int) -> bool:
    """Whether a process ends within seconds."""
    for _ in range(200):
        try:
            if ") Z " in Path(f"/proc/{pid}/stat").read_text():
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_what_hangs_ends_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHILD", str(tmp_path / "child"))
    told = sentence_of(UserReward(NamedCode(f"{JUDGES}:starts_and_hangs"), 1.0), samples_of(["bad"]))
    assert "takes longer than 1 s" in told and gone(int((tmp_path / "child").read_text()))


def test_what_exits_leaves_nothing_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHILD", str(tmp_path / "child"))
    reward = UserReward(NamedCode(f"{JUDGES}:starts_and_exits"), 20.0)
    told = sentence_of(reward, samples_of(["bad"]))
    assert "fails, since its process ended by itself, with exit code 3, called with" in told
    assert gone(int((tmp_path / "child").read_text()))


def test_what_has_a_session_of_its_own_ends_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHILD", str(tmp_path / "child"))
    for function, seconds in (("sessions_and_hangs", 1.0), ("sessions_and_exits", 20.0)):
        sentence_of(UserReward(NamedCode(f"{JUDGES}:{function}"), seconds), samples_of(["bad"]))
        assert gone(int((tmp_path / "child").read_text()))


def test_an_answer_without_end_is_not_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "MAX_ANSWER_BYTES", 1 << 20)
    told = sentence_of(UserReward(NamedCode(f"{JUDGES}:floods"), 20.0), samples_of(["bad"]))
    assert "answers with more than 1.05 MB, called with" in told


@pytest.mark.parametrize(
    "function", ["hangs", "spins", "starts_and_hangs", "forks_and_spins", "sessions_and_hangs"]
)
def test_processes_end_with_a_killed_rank(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With whatever a function has started there."""
    child = tmp_path / "child"
    monkeypatch.setenv("CHILD", str(child))
    code = (
        "import sys; from hpctrain.post.rewards.process_rewards import *; "
        f"r = UserReward(NamedCode({f'{JUDGES}:{function}'!r}), processes=2, batch_size=1); r.start(); "
        "r._processes.start(2); print(*[p.process.pid for p in r._processes._processes], flush=True); "
        "r.scores([Sample('', 'bad')] * 2)"
    )
    rank = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    pids = [*map(int, rank.stdout.readline().split())]
    time.sleep(0.5)
    rank.send_signal(signal.SIGKILL)
    rank.wait()
    rank.stdout.close()
    assert len(pids) == 2 and all(map(gone, pids))
    assert child.exists() == function.endswith(("and_hangs", "and_spins"))
    assert not child.exists() or gone(int(child.read_text()))


@pytest.mark.mpi
def test_ranks_judge_shares_and_agree(world: World) -> None:
    texts = ["x" * (n % 5) for n in range(11)]
    rewards = Rewards([(UserReward(NamedCode(f"{JUDGES}:length")), 1.0), (ExactMatch(), 10.0)])
    scores = score_on_all_ranks(world, rewards, samples_of(texts, answer="xx"))
    alone = [float(len(text)) + 10 * (text == "xx") for text in texts]
    assert scores.totals == alone and scores.parts["length"] == [*map(len, texts)]
    beats = world.ledger.calls.signs_of_life
    assert score_on_all_ranks(world, rewards, samples_of(texts, answer="xx"), at_once=2).totals == alone
    # A sign of life for each two of the share and each reward, however long they take.
    assert world.ledger.calls.signs_of_life - beats > 2 * (len(texts) // world.size // 2)
    assert score_on_all_ranks(world, rewards, samples_of(["xx"], answer="xx")).totals == [12.0]
    assert score_on_all_ranks(world, rewards, []).totals == []
    rewards.close()
    bad = Rewards([(UserReward(NamedCode(f"{JUDGES}:nan")), 1.0)])
    for place in (0, 10):
        texts = ["good"] * place + ["bad"] + ["good"] * (10 - place)
        with pytest.raises(HpctrainError) as raised:
            score_on_all_ranks(world, bad, samples_of(texts))
        numbers = f"sample {place % 4 + 1} of prompt {place // 4} "
        assert len(raised.value.problems) == 1 and f"returns NaN, called with {numbers}" in str(raised.value)
    bad.close()
