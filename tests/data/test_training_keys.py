"""Keys of rows and messages by which other trainers control what is learned: data/training_keys.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hpctrain.comm.world import World
from hpctrain.data.chat_rows import Conversation, conversation_of, preference_of, prompt_of
from hpctrain.data.prepare_any import prepare_any
from hpctrain.data.tokens import TokenFile
from hpctrain.data.training_keys import row_keys
from hpctrain.errors import HpctrainError
from tests.data.chats import talk, write_rows

FOUR = talk("a", "first", "b", "second")
NEMO = [{"from": "User", "value": "a"}, {"from": "Assistant", "value": "first", "label": "quality:4"}]


def said_of(world: World, folder: Path, rows: list[Any], kind: str = "chat") -> tuple[list[str], int]:
    """What `hpctrain prepare` says about rows, and the number of rows in the token file."""
    said: list[str] = []
    source, out = write_rows(folder / "rows.jsonl", rows), folder / "out.h5"
    choices = {"kind": kind, "template": "raw"}
    prepare_any(world.single_rank_world(), out, [source], choices, said.append, lambda *_: None)
    return [line.replace(f"{folder}/", "") for line in said], TokenFile(out).contents.rows


@pytest.mark.parametrize("kind", ["chat", "preferences"])
@pytest.mark.parametrize("key", ["weight", "sample_weight"])
def test_a_row_of_weight_0_is_left_out(world: World, tmp_path: Path, kind: str, key: str) -> None:
    row = {"messages": FOUR} if kind == "chat" else {"prompt": "a", "chosen": "b", "rejected": "c"}
    said, rows = said_of(world, tmp_path, [{**row, key: 0}, {**row, key: 1}, {**row, key: None}, row], kind)
    noun = "conversation" if kind == "chat" else "pair"
    assert (said, rows) == ([f"left out 1 {noun}, whose {key} is 0 (rows.jsonl:1)"], 3)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"weight": 0.5}, "ignored weight, since all rows with a weight above 0 count the same"),
        ({"images": ["a.png"]}, "ignored images, since only text is used"),
        ({"train_on_prompt": True}, "ignored train_on_prompt, since only assistant messages are learned"),
        ({"input_ids": [1, 2]}, "ignored input_ids, since tokens are made from the text"),
        (
            {"chat_template_kwargs": {"a": 1}},
            "ignored chat_template_kwargs, since chat templates do not receive",
        ),
        ({"history": [["a", "b"]]}, "ignored history, since the list of messages is the whole conversation"),
    ],
)
def test_a_key_without_effect_is_said_once(
    world: World, tmp_path: Path, keys: dict[str, Any], line: str
) -> None:
    said, rows = said_of(world, tmp_path, [{"messages": FOUR, **keys}] * 3 + [{"messages": FOUR}])
    assert rows == 4 and len(said) == 1
    assert said[0].startswith(line) and said[0].endswith(": 3 conversations (rows.jsonl:1, rows.jsonl:2 ...)")


def test_keys_of_messages_without_effect_are_said_once(world: World, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = [{**message, "train": True} for message in FOUR]
    called = [*FOUR, {"role": "function_call", "content": "{}"}]
    rows = [{"messages": asked}, {"conversations": NEMO, "type": "VALUE_TO_TEXT"}, {"messages": called}]
    said, _ = said_of(world, tmp_path, rows)
    assert [line.partition(", since")[0] for line in said] == [
        "ignored train = true in messages of other roles",
        "ignored label of messages",
        "ignored role = function_call",
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": FOUR, "train": False}, "whose train is false"),
        (
            {"prompt": "a", "completion": "b", "label": False},
            "whose answer is marked as bad (label is false)",
        ),
        ({"messages": FOUR, "kto_tag": False}, "whose answer is marked as bad (kto_tag is false)"),
        (
            {"messages": [FOUR[0], {**FOUR[1], "masked": True}]},
            "in which every answer is excluded",
        ),
    ],
)
def test_rows_that_exclude_themselves_are_left_out(
    world: World, tmp_path: Path, row: dict[str, Any], reason: str
) -> None:
    said, rows = said_of(world, tmp_path, [row, {"messages": FOUR, "label": True}])
    assert rows == 1 and len(said) == 1 and said[0].startswith(f"left out 1 conversation, {reason}")


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"weight": -1}, "has weight = -1: must be a non-negative number"),
        ({"weight": "0"}, 'has weight = "0": must be a non-negative number'),
        ({"weight": float("nan")}, "has weight = NaN: must be a non-negative number"),
        ({"mask": "Assistant"}, 'has mask = "Assistant": must be a role other than the assistant'),
        ({"mask": [0, 1]}, "has mask = [0, 1]: must be a role other than the assistant"),
        (
            {"completion_mask": [0, 1]},
            "has completion_mask: masks of tokens are unsupported",
        ),
        ({"mask_history": "yes"}, 'has mask_history = "yes": must be true or false'),
    ],
)
def test_keys_of_rows_that_exclude_something_else_are_refused(keys: dict[str, Any], problem: str) -> None:
    row = {"messages": FOUR, **keys}
    with pytest.raises(HpctrainError, match=re.escape(problem)):
        assert not row_keys(row, answers=True).left_out and conversation_of(row)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"mask": 1}, "message 2 has mask = 1: must be true (the message is not learned) or false"),
        (
            {"train_detail": [{"begin_offset": 0}]},
            "message 2 has train_detail, which excludes parts",
        ),
        ({"loss_mask": [0, 1]}, "message 2 has loss_mask = [0, 1]: must be 0 or 1"),
        (
            {"content": [{"type": "text", "text": "b", "train": False}]},
            "part of its content with train = false",
        ),
    ],
)
def test_flags_of_messages_that_cannot_be_followed(flags: dict[str, Any], problem: str) -> None:
    row = {"system": "s", "messages": [FOUR[0], {"role": "assistant", "content": "b", **flags}]}
    with pytest.raises(HpctrainError, match=re.escape(problem)):
        conversation_of(row)


@pytest.mark.parametrize(
    "flags",
    [{"mask": True}, {"masked": True}, {"loss_scale": 0}, {"loss_mask": 0}, {"step_loss_mask": 0}],
)
def test_every_flag_excludes_its_message(flags: dict[str, Any]) -> None:
    messages = [*FOUR[:1], {**FOUR[1], **flags}, *FOUR[2:]]
    made = conversation_of({"messages": messages})
    assert (list(made.messages), made.learned) == (FOUR, [3])
    assert conversation_of({"messages": [*FOUR, *talk("c", "third")], "mask_history": True}).learned == [5]


def test_flags_in_preferences() -> None:
    excluded, last = {**FOUR[1], "train": False}, {"role": "assistant", "content": "third"}
    row = {"prompt": FOUR[:1], "chosen": [excluded, FOUR[2], FOUR[3]], "rejected": [last], "system": "s"}
    pair = preference_of(row)
    assert pair.chosen.learned == [4] and pair.rejected.learned == [2]
    assert [message["content"] for message in pair.chosen.messages] == ["s", "a", "first", "b", "second"]
    with pytest.raises(HpctrainError, match="excludes every assistant message in `chosen`"):
        preference_of({**row, "chosen": [excluded]})


def test_prompts_are_not_learned() -> None:
    """As in TRL, the loss of a `prompt` of messages with a `completion` is that of the completion."""
    made = conversation_of({"prompt": FOUR[:3], "completion": FOUR[3:], "system": "s"})
    assert made.learned == [4] and made.first == 4


def test_history_and_system_belong_to_the_conversation() -> None:
    row = {"instruction": "b", "output": "second", "history": [["a", "first"]], "system": "s"}
    made = conversation_of(row)
    assert made == Conversation(talk("a", "first", "b", "second", system="s"))
    assert conversation_of({**row, "mask_history": True}).learned == [4]
    sharegpt = {
        "system": "s",
        "conversations": [{"from": "Human", "value": "a"}, {"from": "gpt", "value": "b"}],
    }
    assert conversation_of(sharegpt) == Conversation(talk("a", "b", system="s"))
    assert (
        conversation_of({"system": "t", "messages": talk("a", "b", system="s")}).messages[0]["content"] == "s"
    )
    assert prompt_of({"system_prompt": "s", "messages": FOUR[:1]}).conversation.messages == talk(
        "a", system="s"
    )
    assert conversation_of({"conversations": NEMO, "mask": "User"}).learned == [1]
    for history in ("a", [["a"]], [{"a": "b"}]):
        with pytest.raises(HpctrainError, match="in `history`"):
            conversation_of({**row, "history": history})


def test_tools_may_be_a_text_of_json() -> None:
    assert conversation_of({"messages": FOUR, "tools": '[{"name": "f"}]'}).tools == [{"name": "f"}]
    assert conversation_of({"messages": FOUR, "tools": ""}).tools is None
    with pytest.raises(HpctrainError, match="has a text in `tools` that is not JSON"):
        conversation_of({"messages": FOUR, "tools": "[f"})
