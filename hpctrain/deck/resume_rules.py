"""Rules of what happens to a resumed run if a key of its deck has changed, which `resume_rules.toml` lists.

A key has one of three policies. "free": the run continues with the new value. "fresh optimizer": the
checkpoint has no optimizer state for the new value, so the run continues only with `optimizer.restart =
true`, which initializes that state again. "refused": the new value changes the parameters or the function
that they compute, so it is an error. `train/resume_check.py` compares two decks by these
rules. `tests/deck/test_resume_rules.py` compares the file with the schema: every new key needs a line there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from hpctrain.deck.toml import read_data_file

Policy = Literal["free", "fresh optimizer", "refused"]

PARAMETERS = "changes its parameters"
"""Reason of a refusal: the new value changes the parameters of the model."""

FUNCTION = "changes what its parameters compute"
"""Reason of a refusal: the new value changes the function that the model computes."""


@dataclass(frozen=True)
class ResumeRule:
    """Rule for a key whose value has changed on a resume: "free", "fresh optimizer" or "refused", and a note.

    Attributes:
        policy: The policy of the key.
        note: The reason of a refusal (`PARAMETERS`, `FUNCTION` or another clause), or a condition or
            consequence that the user should know; "" if there is none.
    """

    policy: Policy
    note: str = ""

    @property
    def sentence(self) -> str:
        """The rule as `hpctrain deck --reference` prints it, such as "Resume: free."."""
        return f"Resume: {self.policy}" + (f" ({self.note})." if self.note else ".")


@cache
def resume_rules() -> Mapping[str, ResumeRule]:
    """Return the rule of every key of the deck by its full name, in the order of `resume_rules.toml`. Local.

    The file belongs to the package and lists all keys of the schema. Keys of tables in sections are among
    them, such as "model.adapters.rank", and keys of tables in lists, such as "evaluation.sets.tokens". Old
    names of keys are not. All calls return the same mapping, which must not be changed.
    """
    rules: dict[str, ResumeRule] = {}
    for table, rows in read_data_file("resume_rules.toml").items():
        for names, rule in rows.items():
            policy, _, note = rule.partition(": ")
            rules |= {f"{table}.{name}": ResumeRule(policy, note) for name in names.split()}
    return rules


def keys_of_policy(policy: Policy) -> tuple[str, ...]:
    """Return the full names of the keys whose rule has a policy, in the order of `resume_rules.toml`."""
    return tuple(key for key, rule in resume_rules().items() if rule.policy == policy)
