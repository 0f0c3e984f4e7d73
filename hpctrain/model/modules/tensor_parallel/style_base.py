"""Base class of the styles of tensor parallelism."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from hpctrain.model.modules.tensor_parallel.module_names import ModuleNames

if TYPE_CHECKING:
    from hpctrain.model.modules.tensor_parallel.apply_plan import ModuleSplit


@dataclass(frozen=True)
class SplitStyle(ABC):
    """Style of one submodule, parameter or attribute of a module. Its fields are the options of the style.

    Attributes:
        name: Name in `model.plan`.
        options: Options that a plan may set.
        covers_parameters: True if the style says how the part's parameters are held. No other style may then
            apply to these parameters.
        splits_parameters: True if ranks hold pieces of the part's parameters.
        needs_whole_sequences: True if the part needs whole sequences, so that the style conflicts with
            layout.sequence_parallel.
        may_be_gathered: True if the part may be inside a submodule with the style "gather".
    """

    name: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ()
    covers_parameters: ClassVar[bool] = False
    splits_parameters: ClassVar[bool] = False
    needs_whole_sequences: ClassVar[bool] = False
    may_be_gathered: ClassVar[bool] = True

    def matching(self, names: ModuleNames, pattern: str) -> list[str]:
        """Return all matching parts that the style may apply to, each by the first of its names."""
        return names.matching(pattern)

    def no_match_message(self, names: ModuleNames, pattern: str) -> str:
        """Return the message that nothing matches a pattern."""
        return names.no_match_message(pattern)

    def problems(self, names: ModuleNames, name: str, ranks: int) -> Iterator[str]:
        """Yield the reasons why the style cannot be applied to a part, by its name, on so many ranks."""
        part = names.modules.get(name)
        if part is None:
            supported = '"partial", "sequence" and "split parameter"'
            yield f"{name} is a parameter, for which only {supported} are supported"
        else:
            yield from self._module_problems(part, name, ranks)

    def _module_problems(self, part: nn.Module, name: str, ranks: int) -> Iterator[str]:  # noqa: ARG002
        yield from ()

    @abstractmethod
    def apply(self, split: ModuleSplit, name: str) -> None:
        """Change the part with this name in the module that is split."""
