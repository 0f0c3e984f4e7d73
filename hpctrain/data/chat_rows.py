"""Messages of a row of JSON, in any of the formats in which files contain conversations.

A conversation is `messages` of role and content, `conversations` of from and value (ShareGPT), `prompt`
with `response` or `completion`, or `instruction` with `output` and perhaps `input` (Alpaca). The row may
contain a `system` text, and with the last two forms a `history` of earlier questions and answers
(LLaMA-Factory). `data/training_keys.py` tells which messages are not learned. Errors are HpctrainErrors
without the place of the row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hpctrain.data.chat_roles import ASSISTANT, template_role
from hpctrain.data.chat_template import Message
from hpctrain.data.training_keys import MESSAGE_KEYS, is_learned, masks_history, require_learned_part
from hpctrain.deck.sources import clipped
from hpctrain.errors import HpctrainError
from hpctrain.files import parse_json
from hpctrain.text import counted, kind_of, text_problem

_LISTS = ("messages", "conversations", "conversation")
_ANSWERS = ("response", "completion")
_SYSTEM_KEYS = ("system", "system_prompt")
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
    def silent(self) -> bool:
        """True if no assistant says anything."""
        return all(message["role"] != ASSISTANT for message in self.messages)

    @property
    def learned(self) -> list[int]:
        """Indices of the messages that are learned."""
        return [
            number
            for number, message in enumerate(self.messages)
            if message["role"] == ASSISTANT and number >= self.first and number not in self.unlearned
        ]


class Preference(NamedTuple):
    """Two conversations that begin with the same messages, of which one is preferred.

    Attributes:
        chosen: The conversation that is preferred.
        rejected: The other conversation.
        other_keys: The other keys of the row.
    """

    chosen: Conversation
    rejected: Conversation
    other_keys: Mapping[str, Any]

    @property
    def equal(self) -> bool:
        """True if both answers are equal, so that there is no preference."""
        return self.chosen.messages == self.rejected.messages


class PromptRow(NamedTuple):
    """Prompt that an assistant answers, with the other keys of its row."""

    conversation: Conversation
    other_keys: Mapping[str, Any]


def conversation_of(row: Any) -> Conversation:
    """Return the conversation of a row.

    Raises:
        HpctrainError: The row contains none, or excludes parts of it in a way that cannot be followed.
    """
    row = _object(row, _FORMS)
    name = next((each for each in _LISTS if row.get(each) is not None), None)
    first = 0
    if name is not None:
        messages = _messages(row[name], name)
    elif row.get("instruction") is not None:
        messages = [*_history(row), _new_message("user", _instruction(row)), *_turn(row, "output", ASSISTANT)]
    elif row.get("prompt") is not None and (answers := [a for a in _ANSWERS if row.get(a) is not None]):
        prompt = _turn(row, "prompt", "user")
        messages = [*_history(row), *prompt]
        if any(message["role"] == ASSISTANT for message in prompt):
            first = len(messages)  # as in TRL, only the completion is learned
        messages += _turn(row, answers[0], ASSISTANT)
    else:
        raise HpctrainError(f"has no conversation: expected {_FORMS}{_has(row)}")
    messages, unlearned = _split_flags(messages)
    if masks_history(row):
        unlearned = tuple(sorted({*unlearned, *_before_last_answer(messages)}))
    system = _system(row, messages)
    shift = len(system)
    return Conversation(
        [*system, *messages],
        first + shift if first else 0,
        _tools(row),
        tuple(number + shift for number in unlearned),
    )


def _split_flags(messages: Sequence[Message]) -> tuple[list[Message], tuple[int, ...]]:
    """Return the messages without the keys that control training, and the indices of those not learned.

    Raises:
        HpctrainError: A key has a value that cannot be followed.
    """
    unlearned = tuple(number for number, message in enumerate(messages) if not is_learned(message, number))
    return [{key: each[key] for key in each if key not in MESSAGE_KEYS} for each in messages], unlearned


def _before_last_answer(messages: Sequence[Message]) -> list[int]:
    """Return the indices of the messages in front of the last turn of an assistant."""
    end = max((n for n, message in enumerate(messages) if message["role"] == ASSISTANT), default=0)
    while end and messages[end - 1]["role"] == ASSISTANT:
        end -= 1
    return list(range(end))


def preference_of(row: Any) -> Preference:
    """Return the preference of a row.

    `chosen` and `rejected` are each an answer to `prompt`, or a conversation as a whole.

    Raises:
        HpctrainError: The row contains none, or excludes parts of it in a way that cannot be followed.
    """
    row = _object(row, "`chosen` and `rejected`")
    missing = [name for name in ("chosen", "rejected") if row.get(name) is None]
    if missing:
        raise HpctrainError(f"has no `{missing[0]}`{_has(row)}")
    tools = _tools(row)
    (chosen, excluded), (rejected, excluded_rejected) = (
        _split_flags(_turn(row, name, ASSISTANT)) for name in ("chosen", "rejected")
    )
    prompt: list[Message] = []
    if row.get("prompt") is not None:
        prompt, _ = _split_flags(_turn(row, "prompt", "user"))
        prompt = [*_system(row, prompt), *prompt]
        if not all(_begins_with(answer, prompt) for answer in (chosen, rejected)):
            chosen, rejected = [*prompt, *chosen], [*prompt, *rejected]
            excluded, excluded_rejected = (
                tuple(number + len(prompt) for number in each) for each in (excluded, excluded_rejected)
            )
    elif isinstance(row["chosen"], str) or isinstance(row["rejected"], str):
        raise HpctrainError("has no `prompt`, which texts in `chosen` and `rejected` require")
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
    pair = (
        Conversation(chosen, first, tools, excluded),
        Conversation(rejected, first, tools, excluded_rejected),
    )
    for name, each in zip(("chosen", "rejected"), pair, strict=True):
        if not any(message["role"] == ASSISTANT for message in each.messages[first:]):
            raise HpctrainError(
                f"has no assistant message in `{name}` after the messages that both answers share"
            )
        if not each.learned:
            raise HpctrainError(f"excludes every assistant message in `{name}` from training")
    other_keys = {
        key: value for key, value in row.items() if key not in {"prompt", "chosen", "rejected", "tools"}
    }
    return Preference(*pair, other_keys)


def prompt_of(row: Any) -> PromptRow:
    """Return the prompt of a row: `prompt`, or `messages` that an assistant is to continue.

    Raises:
        HpctrainError: The row contains none.
    """
    row = _object(row, "`prompt` or `messages`")
    name = next((each for each in ("prompt", *_LISTS) if row.get(each) is not None), None)
    if name is None:
        raise HpctrainError(f"has neither `prompt` nor `messages`{_has(row)}")
    messages = _turn(row, name, "user") if name == "prompt" else _messages(row[name], name)
    if messages[-1]["role"] == ASSISTANT:
        raise HpctrainError(f"has an assistant message at the end of `{name}`; expected a message to answer")
    messages, _ = _split_flags(messages)
    messages = [*_system(row, messages), *messages]
    used = {name, "tools", *(key for key in _SYSTEM_KEYS if _system_text(row, key))}
    other_keys = {key: value for key, value in row.items() if key not in used}
    return PromptRow(Conversation(messages, len(messages), _tools(row)), other_keys)


def _object(row: Any, forms: str) -> Mapping[str, Any]:
    if not isinstance(row, Mapping):
        raise HpctrainError(f"is {kind_of(row)}, not an object with {forms}")
    if text_problem(json.dumps(row, ensure_ascii=False, default=str)):
        raise HpctrainError("has an unpaired UTF-16 surrogate in a text, which is not a character")
    return row


def _has(row: Mapping[str, Any]) -> str:
    names = [name for name, value in row.items() if value is not None]
    return f" (it has {', '.join(names[:8])})" if names else " (it is empty)"


def _system(row: Mapping[str, Any], messages: Sequence[Message]) -> list[Message]:
    """Return the message with the system text of the row; none if `messages` begin with one themselves."""
    text = next(filter(None, (_system_text(row, key) for key in _SYSTEM_KEYS)), "")
    return [_new_message("system", text)] if text and messages[0]["role"] != "system" else []


def _system_text(row: Mapping[str, Any], key: str) -> str:
    text = row.get(key)
    return text if isinstance(text, str) else ""


def _tools(row: Mapping[str, Any]) -> Any:
    """Return the tools of a row, which some data files contain as a text of JSON."""
    tools = row.get("tools")
    if not isinstance(tools, str):
        return tools
    if not tools.strip():
        return None
    try:
        return parse_json(tools)
    except ValueError:
        raise HpctrainError("has a text in `tools` that is not JSON") from None


def _history(row: Mapping[str, Any]) -> list[Message]:
    """Return the earlier questions and answers of a row, which are pairs of texts."""
    pairs = row.get("history") or []
    if not isinstance(pairs, list):
        raise HpctrainError(f"has {kind_of(pairs)} in `history`, not a list of pairs of texts")
    messages = list[Message]()
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise HpctrainError("has an entry in `history` that is not a pair of texts (question, answer)")
        messages += [_new_message("user", pair[0]), _new_message(ASSISTANT, pair[1])]
    return messages


def _instruction(row: Mapping[str, Any]) -> str:
    values = (row.get(name) for name in ("instruction", "input"))
    parts = [part for part in values if part is not None and part != ""]
    wrong = next((part for part in parts if not isinstance(part, str)), None)
    if wrong is not None:
        raise HpctrainError(f"has {kind_of(wrong)} in `instruction` or `input`, not text")
    return "\n\n".join(parts)


def _turn(row: Mapping[str, Any], name: str, role: str) -> list[Message]:
    """Return the messages under a key: a list of messages, one message, or a text that `role` says."""
    value = row.get(name)
    if isinstance(value, str):
        return [_new_message(role, value)]
    if isinstance(value, Mapping):  # one message
        value = [value]
    if not isinstance(value, list):
        raise HpctrainError(f"has {kind_of(value)} for `{name}`, not text or a list of messages")
    return _messages(value, name)


def _new_message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _messages(value: Any, name: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        what = "no message" if isinstance(value, list) else f"{kind_of(value)}, not a list of messages"
        raise HpctrainError(f"has {what} in `{name}`")
    return [_message(each, f"message {number} of {len(value)}") for number, each in enumerate(value, 1)]


def _message(value: Any, title: str) -> Message:
    if not isinstance(value, Mapping):
        raise HpctrainError(f"{title} is {kind_of(value)}, not an object with role and content")
    # In tables, a missing key is a null.
    message = {key: entry for key, entry in value.items() if entry is not None}
    role = message.pop("role", None) or message.pop("from", None)
    if not isinstance(role, str):
        has = f" (it has {', '.join(map(str, value))})" if value else ""
        raise HpctrainError(f"{title} has no `role`{has}")
    if "content" not in message and "value" in message:
        message["content"] = message.pop("value")
    content = message.get("content", "" if message.get("tool_calls") else None)
    if isinstance(content, list):
        content = _joined(content, title)
    if not isinstance(content, str):
        raise HpctrainError(f"{title} has {kind_of(content)} for its content, not text")
    return {**message, "role": template_role(role), "content": content}


def _joined(parts: Sequence[Any], title: str) -> str:
    """Return the text of a content that is a list of parts, as for models that also see images.

    Raises:
        HpctrainError: A part is not text.
    """
    texts = list[str]()
    for part in parts:
        if isinstance(part, Mapping):
            require_learned_part(part, title)
        of_text = isinstance(part, Mapping) and part.get("type") == "text"
        text = part.get("text") if of_text else None
        if not isinstance(text, str):
            what = f"of type {clipped(str(part.get('type')))}" if isinstance(part, Mapping) else kind_of(part)
            wrong = f"whose text is {kind_of(text)}" if of_text else f"that is {what}, not text"
            raise HpctrainError(f"{title} has a part of its content {wrong}")
        texts.append(text)
    return "".join(texts)


def _begins_with(messages: Sequence[Message], prompt: Sequence[Message]) -> bool:
    """Return True if messages begin with those of a prompt and continue."""
    return len(messages) > len(prompt) and list(messages[: len(prompt)]) == list(prompt)


def left_out_words(number: int, examples: Sequence[str], noun: str, why: str) -> str:
    """Return a line about rows that are left out.

    Args:
        number: How many they are.
        examples: Places of some of them.
        noun: What a row is called.
        why: The reason as a clause, such as "whose answers are equal".
    """
    return f"left out {counted(number, noun)}, {why} ({_places(number, examples)})"


def ignored_words(number: int, examples: Sequence[str], noun: str, key: str) -> str:
    """Return a line about a key of rows that has no effect.

    Args:
        number: How many rows have it.
        examples: Places of some of them.
        noun: What a row is called.
        key: The key and the reason, such as "images, since only text is used".
    """
    return f"ignored {key}: {counted(number, noun)} ({_places(number, examples)})"


def _places(number: int, examples: Sequence[str]) -> str:
    return ", ".join(examples[:2]) + (" ..." if number > 2 else "")
