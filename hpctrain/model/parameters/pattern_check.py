"""Check of patterns of parameter names.

Some parameters are fused into one matrix or vector in memory. A pattern has to match all or none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain

from hpctrain.deck.sources import toml_value
from hpctrain.parallel.shards import Parameter


@dataclass(frozen=True)
class PatternCheck:
    """Checks patterns of parameter names that a deck has.

    Each must match something, and all or none of the parameters that are fused.

    Attributes:
        groups: For each group of fused parameters, the names that match and the names that do not.
        unknown: Patterns that match no parameter.
    """

    groups: Sequence[tuple[Sequence[str], Sequence[str]]]
    unknown: Sequence[str]

    @staticmethod
    def compare(
        patterns: Sequence[str],
        groups: Iterable[Iterable[Parameter]],
        further: Iterable[str] = (),
        matches: Callable[[str, str], bool] = lambda pattern, name: fnmatchcase(name, pattern),
    ) -> PatternCheck:
        """Compare patterns with the names of parameters.

        Args:
            patterns: The patterns.
            groups: Groups of fused parameters.
            further: Further names. A pattern that matches only these is not unknown.
            matches: Returns True if a pattern matches a name.

        Returns:
            For each group, the names that match any pattern and those that do not; and the patterns that
            match nothing.
        """
        known = [[parameter.shard.name for parameter in group] for group in groups]
        names = [*chain(*known), *further]
        named = {name for name in names if any(matches(pattern, name) for pattern in patterns)}
        return PatternCheck(
            [([n for n in group if n in named], [n for n in group if n not in named]) for group in known],
            [pattern for pattern in patterns if not any(matches(pattern, name) for name in named)],
        )

    def problems(self, partial: str, unknown: str, none: str = "", all_match: str = "") -> list[str]:
        """Return the problems, as ends of sentences.

        Args:
            partial: Format of a problem of a group that matches in part, with a matching and another name.
            unknown: Format of a problem of a pattern that matches nothing, with the pattern.
            none: Problem if no group matches.
            all_match: Problem if all names of all groups match.
        """
        problems = [
            partial.format(named[0], unmatched[0]) for named, unmatched in self.groups if named and unmatched
        ]
        problems += [unknown.format(toml_value(pattern)) for pattern in self.unknown]
        if not problems and none and not any(named for named, _ in self.groups):
            problems.append(none)
        if not problems and all_match and not any(unmatched for _, unmatched in self.groups):
            problems.append(all_match)
        return list(dict.fromkeys(problems))
