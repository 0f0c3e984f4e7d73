"""Types and bounds of what the state of a checkpoint may hold.

Every reader takes the state from `examine`, which calls `require_state` once. Keys that are not listed here
are kept as they are: their readers check them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

_Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _EngineState(BaseModel):
    """State of one engine besides its tensors; older files lack some of it."""

    model_config = ConfigDict(strict=True)

    updates: _Count = 0
    totals: dict[str, float] | None = None
    under_way: dict[str, _Count] | None = None
    loss_scale: Annotated[FiniteFloat, Field(gt=0)] | None = None
    loss_scale_good_steps: _Count = 0
    noise_scale: _NoiseScale | None = None
    spikes: _Spikes | None = None


class _NoiseScale(BaseModel):
    model_config = ConfigDict(strict=True)

    signal: float
    noise: float
    weight: float


class _Spikes(BaseModel):
    model_config = ConfigDict(strict=True)

    count: _Count = 0
    window: list[Annotated[list[float], Field(min_length=2, max_length=2)]] = []
    found: list[dict[str, Any]] = []


class _Corpus(BaseModel):
    """What was trained on: token files have `tokens`, a data set `samples` and the function that made it."""

    model_config = ConfigDict(strict=True)

    tokens: _Count | None = None
    samples: _Count | None = None
    dataset: str | None = None

    @model_validator(mode="after")
    def _is_either(self) -> _Corpus:
        if self.tokens is None and (self.samples is None or self.dataset is None):
            raise ValueError("needs tokens, or samples and dataset")
        return self


class _TrainingState(_EngineState):
    """State of a run, or of a model alone, which has less."""

    step: _Count = 0
    samples: _Count = 0
    tokens: _Count = 0
    skipped: _Count = 0
    ranks: Annotated[int, Field(ge=1, lt=1 << 31)] = 1
    deck: str = ""
    tokenizer: str | None = None
    corpus: _Corpus | None = None
    split: Annotated[list[_Count], Field(min_length=1)] | None = None
    versions: dict[str, str] = {}
    companions: dict[str, _EngineState] = {}


def require_state(state: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the key, if a state is not of the types that its readers expect."""
    try:
        _TrainingState.model_validate(dict(state))
    except ValidationError as error:
        place = error.errors(include_url=False, include_context=False, include_input=False)[0]["loc"]
        raise ValueError(f"its state has a wrong {'.'.join(map(str, place))}") from None
