"""Keys of rows and messages by which data files of other trainers control training.

The keys of a message decide whether it is learned:

| key | value of a message that is not learned | defined by |
|---|---|---|
| `weight` | 0 | OpenAI, Mistral, Together, Fireworks, axolotl |
| `train`, `training`, `train_on_turn`, `trainable` | false | axolotl |
| `loss`, `loss_scale` | false, 0 | ms-swift, XTuner |
| `loss_mask`, `step_loss_mask`, `loss_weight` | 0 | verl, slime |
| `masked`, `mask` | true | torchtune |

The keys of a row apply to all of its messages. `row_keys` says which rows are left out, and which keys have a
meaning in another trainer but no effect here. Errors are HpctrainErrors without the place of the row.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from hpctrain.data.chat_roles import ASSISTANT, template_role
from hpctrain.deck.sources import clipped_json
from hpctrain.errors import HpctrainError

_LEARNED_FLAGS = frozenset(
    {
        *("weight", "train", "training", "train_on_turn", "trainable"),
        *("loss", "loss_scale", "loss_weight", "loss_mask", "step_loss_mask"),
    }
)
"""Keys of a message that is learned if they are true or 1."""

_MASKED_FLAGS = frozenset({"mask", "masked"})
"""Keys of a message that is not learned if they are true. They must be true or false, since some tools
write 1 for a message that is learned, and others for one that is not.
"""

_NUMBERS = frozenset({"weight", "loss_scale", "loss_weight", "loss_mask", "step_loss_mask"})
"""Keys of a message whose value is a number in other trainers."""

_PART_FLAGS = ("train_detail", "training_detail")
"""Keys of a message that exclude ranges of its characters (axolotl)."""

MESSAGE_KEYS = _LEARNED_FLAGS | _MASKED_FLAGS | {*_PART_FLAGS}
"""Keys of a message that templates do not get."""

MASK_HISTORY = "mask_history"
"""Key of a row of which only the last answer is learned (LLaMA-Factory)."""

_ROW_WEIGHTS = ("weight", "sample_weight", "loss_weight")
_ROW_FLAGS = ("train", "training", "trainable", "loss")
_UNWANTED_FLAGS = ("label", "kto_tag")
"""Keys that are false in a row whose answer is an example of a bad one (TRL's and LLaMA-Factory's KTO)."""

_TOKEN_MASKS = ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask", "prompt_mask")
"""Keys of a row that say of each token whether it is learned."""

_ONLY_ANSWERS = "only assistant messages are learned"
_ONLY_TEXT = "only text is used"
_OWN_TOKENS = "tokens are made from the text"
_NO_VARIABLE = "chat templates do not receive it"
_IGNORED: Mapping[str, str] = {
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _ONLY_TEXT),
    **dict.fromkeys(("input_ids", "attention_mask", "position_ids"), _OWN_TOKENS),
    **dict.fromkeys(("chat_template_kwargs", "enable_thinking", "documents"), _NO_VARIABLE),
    **dict.fromkeys(("functions", "available_tools"), "chat templates receive `tools`"),
    **dict.fromkeys(("train_on_prompt", "train_on_inputs", "train_on_input"), _ONLY_ANSWERS),
}
"""Keys of a row that have no effect here if they are neither empty nor false, with the reason."""

_LISTS = ("messages", "conversations", "conversation", "prompt", "completion", "chosen", "rejected")
"""Keys of a row whose values may be lists of messages."""


class RowKeys(NamedTuple):
    """Effects of the keys of a row besides its messages.

    Attributes:
        left_out: Why the row is left out, as a clause such as "whose weight is 0"; "" if it is not.
        ignored: Keys that have no effect, each with the reason, such as "images, since only text is used".
    """

    left_out: str = ""
    ignored: Collection[str] = ()


def is_learned(message: Mapping[str, Any], number: int) -> bool:
    """Return False if the keys of a message exclude it from training.

    Args:
        message: The message.
        number: Its index in the conversation, for messages.

    Raises:
        HpctrainError: A key has a value that cannot be followed, such as a weight of 0.5.
    """
    title = f"message {number + 1}"
    for name in _PART_FLAGS:
        if message.get(name):
            raise HpctrainError(
                f"{title} has {name}, which excludes parts of a message from training: this is unsupported "
                "(train = false excludes the whole message)"
            )
    for name in sorted(_MASKED_FLAGS & message.keys()):
        if not isinstance(message[name], bool):
            wanted = "true (the message is not learned) or false"
            raise HpctrainError(f"{title} has {name} = {clipped_json(message[name])}: must be {wanted}")
    for name in sorted(_LEARNED_FLAGS & message.keys()):
        if message[name] not in (0, 1):  # not a set: the value may be a list
            wanted = "0 or 1 (other weights are unsupported)" if name in _NUMBERS else "true or false"
            raise HpctrainError(f"{title} has {name} = {clipped_json(message[name])}: must be {wanted}")
    masked = any(message[name] for name in _MASKED_FLAGS & message.keys())
    return not masked and all(message[name] == 1 for name in _LEARNED_FLAGS & message.keys())


def require_learned_part(part: Mapping[str, Any], title: str) -> None:
    """Check that a part of a message's content is not excluded from training.

    Raises:
        HpctrainError: It is, but only whole messages can be excluded. The error begins with `title`.
    """
    excluded = [name for name in sorted(_LEARNED_FLAGS) if name in part and part[name] not in (1, None)]
    excluded += [name for name in sorted(_MASKED_FLAGS) if part.get(name)]
    for name in excluded:
        raise HpctrainError(
            f"{title} has a part of its content with {name} = {clipped_json(part[name])}: only a whole "
            "message can be excluded from training (set the key in the message)"
        )


def row_keys(row: Any, answers: bool) -> RowKeys:
    """Return what the keys of a row ask for.

    Args:
        row: The row; another value than an object has no keys.
        answers: True if its answers are learned as they are, False if they are compared.

    Raises:
        HpctrainError: A key excludes something from training in a way that cannot be followed.
    """
    if not isinstance(row, Mapping):
        return RowKeys()
    for name in _TOKEN_MASKS:
        if row.get(name):
            sentence = "masks of tokens are unsupported"
            raise HpctrainError(f"has {name}: {sentence} (set `train` = false in messages, or leave it out)")
    _check_masked_role(row.get("mask"))
    excluding = [*_zero_weights(row), *(name for name in _ROW_FLAGS if row.get(name) is False)]
    reasons = [f"whose {name} is {clipped_json(row[name])}" for name in excluding]
    unwanted = [name for name in _UNWANTED_FLAGS if answers and row.get(name) is False]
    reasons += [f"whose answer is marked as bad ({name} is false)" for name in unwanted]
    ignored = dict.fromkeys(f"{key}, since {reason}" for key, reason in _ignored_keys(row))
    return RowKeys(reasons[0] if reasons else "", tuple(ignored))


def masks_history(row: Mapping[str, Any]) -> bool:
    """Return True if only the last answer of a row is learned.

    Raises:
        HpctrainError: The key is neither true nor false.
    """
    value = row.get(MASK_HISTORY)
    if value is not None and not isinstance(value, bool):
        raise HpctrainError(f"has {MASK_HISTORY} = {clipped_json(value)}: must be true or false")
    return bool(value)


def _zero_weights(row: Mapping[str, Any]) -> list[str]:
    """Return the weights of a row that are 0.

    Raises:
        HpctrainError: A weight is negative, so that its row is not to be learned, or no number.
    """
    for name in _ROW_WEIGHTS:
        value = row.get(name)
        if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
            wanted = "a non-negative number (0 leaves the row out; other weights have no effect)"
            raise HpctrainError(f"has {name} = {clipped_json(value)}: must be {wanted}")
    return [name for name in _ROW_WEIGHTS if row.get(name) is not None and row[name] == 0]


def _check_masked_role(role: Any) -> None:
    """Check that NeMo's `mask`, the role that is not learned, is not the assistant.

    Raises:
        HpctrainError: It is, or it is no role.
    """
    if role in (None, "", False) or (isinstance(role, str) and template_role(role) != ASSISTANT):
        return
    raise HpctrainError(
        f"has mask = {clipped_json(role)}: must be a role other than the assistant, since only its messages "
        "are learned (leave it out, or exclude messages by `train` = false)"
    )


def _ignored_keys(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys of a row that have no effect, with the reason."""
    for name in _ROW_WEIGHTS:
        if row.get(name) not in (None, 0, 1):
            yield name, "all rows with a weight above 0 count the same"
    for name, reason in _IGNORED.items():
        if row.get(name):
            yield name, reason
    if row.get("history") and any(row.get(name) is not None for name in _LISTS[:3]):
        yield "history", "the list of messages is the whole conversation"
    messages = [message for name in _LISTS for message in _messages(row.get(name))]
    for message in messages:
        role = message.get("role") or message.get("from")
        if role == "function_call":
            yield "role = function_call", f"{_ONLY_ANSWERS}; use the role assistant with `tool_calls`"
        for name in ("train", "training"):
            if isinstance(role, str) and template_role(role) != ASSISTANT and message.get(name) is True:
                yield f"{name} = true in messages of other roles", _ONLY_ANSWERS
        if row.get("type") in ("VALUE_TO_TEXT", "TEXT_TO_VALUE") and message.get("label"):
            yield "label of messages", _NO_VARIABLE


def _messages(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the messages of a list of messages; of another value none."""
    for each in value if isinstance(value, list) else ():
        if isinstance(each, Mapping):
            yield each
