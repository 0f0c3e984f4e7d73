"""Rotary positions: frequencies, which may be scaled for longer sequences, and tables of cosine and sine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, floor, log, pi, sqrt

import torch
from torch import Tensor
from torch.nn.functional import pad

from hpctrain.deck.sections.rope_scaling import RopeScaling
from hpctrain.model.shape import ModelShape


@dataclass(frozen=True)
class RotaryFrequencies:
    """Frequencies of the rotary positions of a model, by which its queries and keys are rotated.

    Attributes:
        head_size: Number of features of an attention head that are rotated in pairs.
        base: Base of the frequencies: that of pair i is base ** (-2 i / head_size) before scaling.
        scaling: Scaling of the frequencies for sequences longer than those of pretraining; None for none.
        sequence: Number of tokens of the text, on which "dynamic" and "longrope" depend.
        unrotated: Number of further features of a head, which are not rotated.
    """

    head_size: int
    base: float
    scaling: RopeScaling | None
    sequence: int
    unrotated: int = 0

    @staticmethod
    def of(shape: ModelShape, text_length: int | None = None) -> RotaryFrequencies:
        """Return the frequencies of a model whose family has rotary positions.

        Args:
            shape: Shape of the model.
            text_length: Number of tokens of the text; None for the length of the model's sequences.
        """
        rotated = shape.rotated_features
        unrotated, length = shape.head_size - rotated, text_length or shape.sequence
        return RotaryFrequencies(rotated, shape.rope_base, shape.rope_scaling, length, unrotated)

    @staticmethod
    def local(shape: ModelShape) -> RotaryFrequencies | None:
        """Return the frequencies of layers with windows; None if they are those of other layers."""
        base = shape.rope_local_base
        return None if base is None else replace(RotaryFrequencies.of(shape), base=base, scaling=None)

    def angles_per_position(self, device: torch.device) -> Tensor:
        """Return the angle of pairs of rotated features per position in radians, fp64 [head_size / 2]."""
        exponents = torch.arange(0, self.head_size, 2, device=device, dtype=torch.float64)
        match self.scaling:
            case None:
                return self._powers(self.base, exponents)
            case RopeScaling(kind="linear", factor=factor):
                return self._powers(self.base, exponents) / factor
            case RopeScaling(kind="dynamic") as scaling:
                return self._powers(self._dynamic_base(scaling), exponents)
            case RopeScaling(kind="llama3") as scaling:
                return _by_wavelength(self._powers(self.base, exponents), scaling)
            case RopeScaling(kind="yarn") as scaling:
                return self._by_index(self._powers(self.base, exponents), scaling)
            case scaling:
                is_longer = self.sequence > _original(scaling)
                divisors = scaling.long_factors if is_longer else scaling.short_factors
                return self._powers(self.base, exponents) / exponents.new_tensor(divisors)

    @property
    def depend_on_length(self) -> bool:
        """True if texts of different lengths may have different frequencies."""
        return self.scaling is not None and self.scaling.kind in {"dynamic", "longrope"}

    @property
    def short_text_limit(self) -> int | None:
        """Number of tokens up to which texts have the short factors of "longrope"; None for other kinds."""
        scaling = self.scaling
        return scaling.original_sequence if scaling is not None and scaling.kind == "longrope" else None

    @property
    def attention_factor(self) -> float:
        """Factor by which rotated queries and rotated keys are multiplied; 1 for most kinds of scaling."""
        scaling = self.scaling
        if scaling is None or scaling.kind not in {"yarn", "longrope"}:
            return 1.0
        if scaling.attention_factor is not None:
            return scaling.attention_factor
        if scaling.kind == "yarn":
            return 0.1 * log(scaling.factor) + 1
        return sqrt(1 + log(scaling.factor) / log(_original(scaling)))

    def _powers(self, base: float, exponents: Tensor) -> Tensor:
        return base ** (-exponents / self.head_size)

    def _dynamic_base(self, scaling: RopeScaling) -> float:
        """Return the base that gives the lowest frequency the range of the longer sequence (NTK)."""
        factor, original = scaling.factor, _original(scaling)
        longer = factor * max(self.sequence, original) / original - (factor - 1)
        return float(self.base * longer ** (self.head_size / (self.head_size - 2)))

    def _by_index(self, frequencies: Tensor, scaling: RopeScaling) -> Tensor:
        """Divide low frequencies by the factor, keep high ones, and interpolate by index (YaRN)."""
        first, last = (self._index(scaling, turns) for turns in (scaling.beta_fast, scaling.beta_slow))
        if scaling.truncate:
            first, last = floor(first), ceil(last)
        first, last = max(first, 0), min(last, self.head_size - 1)
        if first == last:
            last += 0.001
        indices = torch.arange(self.head_size // 2, device=frequencies.device, dtype=torch.float64)
        divided = ((indices - first) / (last - first)).clamp(0, 1)
        return frequencies / scaling.factor * divided + frequencies * (1 - divided)

    def _index(self, scaling: RopeScaling, turns: float) -> float:
        """Return the index of the pair that makes so many turns in the original sequence, as a fraction."""
        return self.head_size * log(_original(scaling) / (turns * 2 * pi)) / (2 * log(self.base))


class Rotary:
    """Rotary position embedding (RoFormer, arXiv 2104.09864), halves rotated as in Llama.

    `tables` are cosine and sine [s, 1, 1, head size] for the given global positions [s], both multiplied by
    the attention factor of the frequencies. `local_tables` are those of layers with windows, often the same.

    Unrotated features are the last ones of both halves of a head. Their cosine is one, and their sine zero.
    """

    def __init__(self, positions: Tensor, frequencies: RotaryFrequencies, dtype: torch.dtype) -> None:
        angles = torch.outer(positions.double(), frequencies.angles_per_position(positions.device))
        factor, padding = frequencies.attention_factor, (0, frequencies.unrotated // 2)
        cosine = pad(angles.cos() * factor, padding, value=1.0)
        sine = pad(angles.sin() * factor, padding)
        cosine, sine = (torch.cat((half, half), dim=-1)[:, None, None, :] for half in (cosine, sine))
        self.tables = self.local_tables = cosine.to(dtype), sine.to(dtype)

    @staticmethod
    def of(
        shape: ModelShape,
        positions: Tensor,
        dtype: torch.dtype,
        head_size: int | None = None,
        text_length: int | None = None,
    ) -> Rotary:
        """Return the rotary positions of a model at some positions.

        Args:
            shape: Shape of the model.
            positions: Global positions, int64 [s].
            dtype: Type of the tables.
            head_size: Features of heads that have more of them that are not rotated; None for those of the
                model.
            text_length: Number of tokens of the text; None for the length of the model's sequences.
        """
        frequencies, local = RotaryFrequencies.of(shape, text_length), RotaryFrequencies.local(shape)
        if head_size is not None:
            unrotated = head_size - frequencies.head_size
            frequencies = replace(frequencies, unrotated=unrotated)
            local = None if local is None else replace(local, unrotated=unrotated)
        rotary = Rotary(positions, frequencies, dtype)
        if local is not None:
            rotary.local_tables = Rotary(positions, local, dtype).tables
        return rotary

    @property
    def all_tables(self) -> tuple[Tensor, ...]:
        """Tables of all layers, each once."""
        return self.tables if self.local_tables is self.tables else (*self.tables, *self.local_tables)


def _by_wavelength(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and interpolate by wavelength (Llama 3)."""
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = _original(scaling) * frequencies / (2 * pi)
    undivided = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies / scaling.factor * (1 - undivided) + frequencies * undivided


def _original(scaling: RopeScaling) -> int:
    assert scaling.original_sequence is not None, scaling
    return scaling.original_sequence
