"""Schema of the JSON state of a checkpoint: types and bounds of its keys.

Every reader gets the state from `examine`, which calls `require_state` once. Keys that are not listed here
are not checked here; the code that reads them checks them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

_Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _EngineState(BaseModel):
    """State of one engine other than its tensors. Older files lack some of the keys."""

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
    """Training data of the run.

    Token files have a number of `tokens`. A user's dataset has a number of `samples` and a `dataset`, which
    names the function that made it.
    """

    model_config = ConfigDict(strict=True)

    tokens: _Count | None = None
    samples: _Count | None = None
    dataset: str | None = None

    @model_validator(mode="after")
    def _has_a_size(self) -> _Corpus:
        if self.tokens is None and (self.samples is None or self.dataset is None):
            raise ValueError("requires tokens, or samples and dataset")
        return self


class _TrainingState(_EngineState):
    """State of a training run. A checkpoint that holds only a model has fewer keys."""

    step: _Count = 0
    samples: _Count = 0
    tokens: _Count = 0
    skipped: _Count = 0
    ranks: Annotated[int, Field(ge=1, lt=1 << 31)] = 1
    deck: str = ""
    tokenizer: str | None = None
    corpus: _Corpus | None = None
    split: Annotated[list[_Count], Field(min_length=1)] | None = None
    compiled: bool | str | None = None
    versions: dict[str, str] = {}
    companions: dict[str, _EngineState] = {}


def require_state(state: Mapping[str, Any]) -> None:
    """Check the types and bounds of a checkpoint's state.

    Raises:
        ValueError: A key has a wrong type or value. The message names the first such key.
    """
    try:
        _TrainingState.model_validate(dict(state))
    except ValidationError as error:
        place = error.errors(include_url=False, include_context=False, include_input=False)[0]["loc"]
        raise ValueError(f"its state has a wrong value for {'.'.join(map(str, place))}") from None
