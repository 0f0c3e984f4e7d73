"""Messages of a row of JSON, in any of the formats in which files contain conversations.

A conversation is `messages` of role and content, `conversations` of from and value (ShareGPT), `prompt`
with `response` or `completion`, or `instruction` with `output` and perhaps `input` (Alpaca); a `system`
text may be given with the last two. An assistant's message is not learned if its `weight` is 0 (OpenAI), or
if `train` or `training` (axolotl) or `loss` (ms-swift) is false. Errors are HpctrainErrors without the place
of the row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hpctrain.characters import text_problem
from hpctrain.data.chat_template import Message
from hpctrain.deck.sources import clipped
from hpctrain.errors import HpctrainError
from hpctrain.words import counted, kind_of

ASSISTANT = "assistant"
_LISTS = ("messages", "conversations", "conversation")
_ANSWERS = ("response", "completion")
_ROLES = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bing": ASSISTANT, "model": ASSISTANT}
_FLAGS = frozenset({"weight", "train", "training", "train_on_turn", "trainable", "loss"})
"""Keys of a message by which trainers exclude it from training."""
_FORMS = "`messages`, `conversations`, `prompt` with `response`, or `instruction` with `output`"


class Conversation(NamedTuple):
    """Messages of a row, and which of them are learned.

    Attributes:
        messages: The messages, as templates get them.
        first: Index of the first message that may be learned.
        tools: Tools that the template describes to the model, or None.
        unlearned: Indices of the assistant's messages that the row excludes from training.
    """

    messages: Sequence[Message]
    first: int = 0
    tools: Any = None
    unlearned: Sequence[int] = ()

    @property
    def learned(self) -> list[int]:
        """Indices of the messages that are learned."""
        return [
            number
            for number, message in enumerate(self.messages)
            if message["role"] == ASSISTANT and number >= self.first and number not in self.unlearned
        ]


class Preference(NamedTuple):
    """The conversation that is preferred to the other one, from the same messages on; and other keys."""

    chosen: Conversation
    rejected: Conversation
    others: Mapping[str, Any]

    @property
    def equal(self) -> bool:
        """Whether there is nothing to prefer."""
        return self.chosen.messages == self.rejected.messages


class Prompt(NamedTuple):
    """What an assistant is to answer; and other keys of the row."""

    asked: Conversation
    others: Mapping[str, Any]


def conversation_of(row: Any) -> Conversation:
    """That of a row."""
    row = _object(row, _FORMS)
    name = next((each for each in _LISTS if row.get(each) is not None), None)
    unlearned: Sequence[int] = ()
    if name is not None:
        messages = _messages(row[name], name)
        unlearned = tuple(n for n, message in enumerate(messages) if not _is_learned(message, n))
        messages = [{key: message[key] for key in message if key not in _FLAGS} for message in messages]
    elif row.get("instruction") is not None:
        messages = [*_system(row), _said("user", _instruction(row))]
        messages += _turn(row, "output", ASSISTANT)
    elif row.get("prompt") is not None and (answers := [a for a in _ANSWERS if row.get(a) is not None]):
        messages = [*_system(row), *_turn(row, "prompt", "user"), *_turn(row, answers[0], ASSISTANT)]
    else:
        raise HpctrainError(f"has no conversation: {_FORMS}{_has(row)}")
    return Conversation(messages, 0, row.get("tools"), unlearned)


def _is_learned(message: Message, number: int) -> bool:
    """Return False if a message's flags exclude it from training.

    Raises:
        HpctrainError: A flag is neither true nor false; a weight is neither 0 nor 1.
    """
    for name in _FLAGS & message.keys():
        if message[name] not in (0, 1):  # not a set: the value may be a list
            wanted = "0 or 1 (other weights are not supported)" if name == "weight" else "true or false"
            raise HpctrainError(f"message {number + 1} has {name} = {message[name]!r}: must be {wanted}")
    return all(message[name] == 1 for name in _FLAGS & message.keys())


def preference_of(row: Any) -> Preference:
    """That of a row: `chosen` and `rejected`, each the answer to `prompt` or a conversation as a whole."""
    row = _object(row, "`chosen` and `rejected`")
    missing = [name for name in ("chosen", "rejected") if row.get(name) is None]
    if missing:
        raise HpctrainError(f"has no `{missing[0]}`{_has(row)}")
    tools = row.get("tools")
    chosen, rejected = (_turn(row, name, ASSISTANT) for name in ("chosen", "rejected"))
    prompt: list[Message] = []
    if row.get("prompt") is not None:
        prompt = [*_system(row), *_turn(row, "prompt", "user")]
        if not all(_begins_with(answer, prompt) for answer in (chosen, rejected)):
            chosen, rejected = [*prompt, *chosen], [*prompt, *rejected]
    elif isinstance(row["chosen"], str) or isinstance(row["rejected"], str):
        raise HpctrainError("has no `prompt`, to which `chosen` and `rejected` would be answers")
    common = 0
    for one, other in zip(chosen[:-1], rejected[:-1], strict=False):
        if one != other:
            break
        common += 1
    if not common:
        raise HpctrainError("has `chosen` and `rejected` that do not begin with the same message")
    first = max(common, len(prompt))
    if prompt and common < len(prompt):
        raise HpctrainError("has a `prompt` that ends within `chosen` or `rejected`")
    for name, messages in (("chosen", chosen), ("rejected", rejected)):
        if not any(each["role"] == ASSISTANT for each in messages[first:]):
            raise HpctrainError(f"has nothing that an assistant says in what is `{name}`")
    others = {
        key: value for key, value in row.items() if key not in {"prompt", "chosen", "rejected", "tools"}
    }
    return Preference(Conversation(chosen, first, tools), Conversation(rejected, first, tools), others)


def prompt_of(row: Any) -> Prompt:
    """That of a row: `prompt`, or `messages` that an assistant is to go on with."""
    row = _object(row, "`prompt` or `messages`")
    name = next((each for each in ("prompt", *_LISTS) if row.get(each) is not None), None)
    if name is None:
        raise HpctrainError(f"has neither `prompt` nor `messages`{_has(row)}")
    messages = _turn(row, name, "user") if name == "prompt" else _messages(row[name], name)
    if messages[-1]["role"] == ASSISTANT:
        raise HpctrainError(f"has `{name}` that end with what an assistant says: nothing is to be answered")
    system = _system(row) if name == "prompt" else []
    used = {name, "tools", *(["system"] if system else [])}
    others = {key: value for key, value in row.items() if key not in used}
    asked = [*system, *messages]
    return Prompt(Conversation(asked, len(asked), row.get("tools")), others)


def _object(row: Any, forms: str) -> Mapping[str, Any]:
    if not isinstance(row, Mapping):
        raise HpctrainError(f"is {kind_of(row)}, not an object with {forms}")
    if text_problem(json.dumps(row, ensure_ascii=False, default=str)):
        raise HpctrainError("has half a pair of UTF-16 in a text, which is no character")
    return row


def _has(row: Mapping[str, Any]) -> str:
    names = [name for name, value in row.items() if value is not None]
    return f" (it has {', '.join(names[:8])})" if names else " (it is empty)"


def _system(row: Mapping[str, Any]) -> list[Message]:
    """What stands beside a prompt."""
    system = row.get("system")
    return [_said("system", system)] if isinstance(system, str) and system else []


def _instruction(row: Mapping[str, Any]) -> str:
    given = (row.get(name) for name in ("instruction", "input"))
    parts = [part for part in given if part is not None and part != ""]
    wrong = next((part for part in parts if not isinstance(part, str)), None)
    if wrong is not None:
        raise HpctrainError(f"has {kind_of(wrong)} in `instruction` or `input`, not text")
    return "\n\n".join(parts)


def _turn(row: Mapping[str, Any], name: str, role: str) -> list[Message]:
    """A text that `role` says, or messages."""
    value = row.get(name)
    if isinstance(value, str):
        return [_said(role, value)]
    if isinstance(value, Mapping):  # one message
        value = [value]
    if not isinstance(value, list):
        raise HpctrainError(f"has {kind_of(value)} for `{name}`, not text or a list of messages")
    return _messages(value, name)


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _messages(found: Any, name: str) -> list[Message]:
    if not isinstance(found, list) or not found:
        what = "no message" if isinstance(found, list) else f"{kind_of(found)}, not a list of messages"
        raise HpctrainError(f"has {what} in `{name}`")
    return [_message(each, f"message {number} of {len(found)}") for number, each in enumerate(found, 1)]


def _message(found: Any, title: str) -> Message:
    if not isinstance(found, Mapping):
        raise HpctrainError(f"{title} is {kind_of(found)}, not an object with role and content")
    # Columns of a table have nothing where a key is not there.
    message = {key: value for key, value in found.items() if value is not None}
    role = message.pop("role", None) or message.pop("from", None)
    if not isinstance(role, str):
        has = f" (it has {', '.join(map(str, found))})" if found else ""
        raise HpctrainError(f"{title} has no `role`{has}")
    if "content" not in message and "value" in message:
        message["content"] = message.pop("value")
    content = message.get("content", "" if message.get("tool_calls") else None)
    if isinstance(content, list):
        content = _joined(content, title)
    if not isinstance(content, str):
        raise HpctrainError(f"{title} has {kind_of(content)} for its content, not text")
    return {**message, "role": _ROLES.get(role, role), "content": content}


def _joined(parts: Sequence[Any], title: str) -> str:
    """The text of a content in parts, as of models that see images, too. HpctrainError where one is none."""
    texts = list[str]()
    for part in parts:
        of_text = isinstance(part, Mapping) and part.get("type") == "text"
        text = part.get("text") if of_text else None
        if not isinstance(text, str):
            what = f"of type {clipped(str(part.get('type')))}" if isinstance(part, Mapping) else kind_of(part)
            wrong = f"whose text is {kind_of(text)}" if of_text else f"that is {what}, not text"
            raise HpctrainError(f"{title} has a part of its content {wrong}")
        texts.append(text)
    return "".join(texts)


def _begins_with(messages: Sequence[Message], prompt: Sequence[Message]) -> bool:
    """Whether messages are those of a prompt, and more."""
    return len(messages) > len(prompt) and list(messages[: len(prompt)]) == list(prompt)


def left_out_words(number: int, examples: Sequence[str], noun: str, why: str) -> str:
    """A line about rows that are not taken."""
    shown = ", ".join(examples[:2]) + (" ..." if number > 2 else "")
    return f"left out {counted(number, noun)}, {why} ({shown})"
