"""The table [model.adapters]: low-rank adapters of the matrices of blocks (LoRA)."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from hpctrain.deck.key import Section, key
from hpctrain.deck.relations import GIVEN, Conflicts, OtherThan, Relations

if TYPE_CHECKING:
    pass

_MOST_RANK = 65536


class Adapters(Section):
    """Low-rank adapters, W + (alpha / rank) B A for each matrix W of their targets (LoRA, arXiv 2106.09685).

    Only A and B are trained.
    """

    rank: int = key("Rank of the adapters: rows of A and columns of B.", 8, ge=1, le=_MOST_RANK)
    alpha: float = key("Scale of the adapters: B A is multiplied by alpha / rank.", 16.0, gt=0, le=1e6)
    targets: tuple[str, ...] = key(
        'Matrices of blocks that get adapters, by the ends of their names: ["query", "value"], '
        '["feed_forward.*"].',
        ("*",),
        strict=False,
        min_length=1,
    )

    @property
    def scale(self) -> float:
        """Factor alpha / rank by which B A is multiplied."""
        return self.alpha / self.rank

    def adapts(self, name: str) -> bool:
        """Return True if a layer of a block has an adapter: if a pattern in `targets` matches its name.

        Args:
            name: Full name of the layer, such as "blocks.0.attention.query". Whether it exists is not
                checked.
        """
        return any(matches_pattern(pattern, name) for pattern in self.targets)


def matches_pattern(pattern: str, name: str) -> bool:
    """Return True if a shell pattern matches the name of a layer, or the end of it after a dot.

    So "query" and "attention.*" match "blocks.0.attention.query". Case counts.
    """
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


_ADAPTERS = "model.adapters"
_SMALL = "the state of adapters is small"

RELATIONS: Relations = (
    Conflicts("model.frozen", _ADAPTERS, because="only adapters are trained"),
    Conflicts("model.parametrization", _ADAPTERS, because="no rule for rates of adapters is known"),
    Conflicts("precision.compute", _ADAPTERS, ("fp8",), GIVEN, because="matrices with adapters need 16 bits"),
    Conflicts(
        "optimizer.name", _ADAPTERS, OtherThan("adamw", "sgd", "lion"), GIVEN, because="it cannot update them"
    ),
    Conflicts("memory.optimizer", _ADAPTERS, because=_SMALL),
    Conflicts("memory.parameters", _ADAPTERS, because=_SMALL),
    Conflicts("layout.local_steps.replicas", _ADAPTERS, because="replicas exchange all parameters"),
    Conflicts(
        "communication.server.mode",
        _ADAPTERS,
        GIVEN,
        GIVEN,
        because="servers update all parameters",
        hint="leave [communication.server] out",
    ),
)
"""Relations of keys of all sections with adapters, which only transformers have."""
