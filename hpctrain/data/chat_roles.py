"""Names of the roles in a conversation, as data files of other trainers write them."""

from __future__ import annotations

ASSISTANT = "assistant"

_TEMPLATE_ROLES = frozenset({"system", "user", ASSISTANT, "tool", "developer"})
_OTHER_NAMES = {
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "model": ASSISTANT,
}


def template_role(name: str) -> str:
    """Return the name that chat templates use for a role, such as "assistant" for "gpt" or "Assistant".

    An unknown name is returned as it is.
    """
    lower = name.lower()
    return lower if lower in _TEMPLATE_ROLES else _OTHER_NAMES.get(lower, name)
