"""`hpctrain bench attention`: the speed of attention with a window, compared with full attention.

Each round measures forward and backward passes, with compiled functions and with functions of torch. On CPUs
it measures processor time, which does not depend on other programs of the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from hpctrain.bench.measurement import clock, publish, slowest
from hpctrain.comm.world import World
from hpctrain.deck.sections.machine import Machine
from hpctrain.engine.choices.function_choice import choose_functions, functions_of
from hpctrain.errors import HpctrainError
from hpctrain.host.device import gpu_name
from hpctrain.host.device_memory import used_bytes
from hpctrain.host.processor import processor_name
from hpctrain.parallel.kernels.attention_inputs import AttentionInputs
from hpctrain.parallel.kernels.attention_tiles import AttentionRule
from hpctrain.parallel.kernels.functions.layer_functions import TORCH, LayerFunctions
from hpctrain.parallel.operations import AttentionSize
from hpctrain.plan.calibrate.calibration_decks import SMALL, gpt_deck
from hpctrain.plan.memory_demand import require_memory
from hpctrain.text import counted, table
from hpctrain.units import format_seconds

FORMATS: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Formats of queries, keys and values by name."""

_TENSORS = 12
"""Least number of tensors of the size of the queries, counted in fp32, that a pass holds with gradients."""

Passes = tuple[float, float]
"""Seconds of the forward and of the backward pass."""


@dataclass(frozen=True)
class AttentionBenchOptions:
    """Attention to measure.

    Attributes:
        sequence: Number of positions.
        window: Number of keys that a query sees, with the one at its own position; None for a quarter of
            the sequence.
        heads: Number of heads of queries.
        key_value_heads: Number of heads of keys and values; None for as many as queries have.
        head_size: Features of a head.
        format_name: Format of queries, keys and values, of FORMATS.
    """

    sequence: int
    window: int | None
    heads: int
    key_value_heads: int | None
    head_size: int
    format_name: str

    def window_size(self) -> AttentionSize:
        """Return the sizes of attention with the window.

        Raises:
            HpctrainError: The window or the number of heads is unsuitable.
        """
        window, groups = self.window or self.sequence // 4, self.key_value_heads or self.heads
        if not 0 < window < self.sequence:
            raise HpctrainError(
                f"--window {window}: must be at least 1 and less than --sequence {self.sequence}"
            )
        if self.heads % groups:
            raise HpctrainError(f"--kv-heads {groups}: must divide --heads {self.heads}")
        return AttentionSize(self.heads, groups, self.head_size, self.sequence, window)


@dataclass(frozen=True)
class AttentionResult:
    """Measured times of one kind of attention: medians over the rounds, of the slowest rank.

    Attributes:
        functions: "compiled" or "torch".
        window: Number of keys that a query sees; 0 for full attention.
        forward_s: Seconds of the forward pass.
        backward_s: Seconds of the backward pass.
        speed: Speed of both passes relative to full attention by the same functions, in each round.
    """

    functions: str
    window: int
    forward_s: float
    backward_s: float
    speed: list[float]


def bench_attention(world: World, options: AttentionBenchOptions, rounds: int, output: Path | None) -> None:
    """Measure attention on every rank at once, and print a table. Collective.

    Args:
        world: All ranks.
        options: Attention to measure.
        rounds: Number of rounds, in each of which everything is measured once.
        output: File for the results; None for no file.

    Raises:
        HpctrainError: The options are unsuitable, or the tensors do not fit into memory.
    """
    with world.agreement():
        size = options.window_size()
    needed = _TENSORS * 4 * options.sequence * options.heads * options.head_size
    place = f"--sequence {options.sequence}"
    require_memory(
        world, Machine(), place, used_bytes(world.device) + needed, lambda _: "use a shorter sequence"
    )
    torch.set_num_threads(1)
    results = measure_attention(world, size, FORMATS[options.format_name], rounds)
    setting = f"{options.format_name}, {gpu_name(world.device) or processor_name()}"
    publish(world, result_lines(results, size, setting), [asdict(each) for each in results], output)


def measure_attention(
    world: World, size: AttentionSize, dtype: torch.dtype, rounds: int
) -> list[AttentionResult]:
    """Return the times of full attention and of attention with the window, by all functions. Collective."""
    variants = {
        (name, window): _pass_timer(functions, size, window, dtype, world.device)
        for name, functions in _functions(world).items()
        for window in (0, size.window)
    }
    times: dict[tuple[str, int], list[Passes]] = {key: [] for key in variants}
    for number in range(rounds + 1):
        for key in variants if number % 2 else reversed(variants):
            world.everyone.barrier()
            forward, backward = variants[key]()
            if number:  # the first round fills caches
                times[key].append((slowest(world, forward), slowest(world, backward)))
    return [
        AttentionResult(
            name,
            window,
            median(forward for forward, _ in seconds),
            median(backward for _, backward in seconds),
            [sum(full) / sum(passes) for full, passes in zip(times[name, 0], seconds, strict=True)],
        )
        for (name, window), seconds in times.items()
    ]


def result_lines(results: Sequence[AttentionResult], size: AttentionSize, setting: str) -> list[str]:
    """Return a table of the results with a heading.

    Args:
        results: The results.
        size: Sizes of attention with the window.
        setting: Format and device.
    """
    heads = f"{counted(size.heads, 'head')} of {size.head_size} features"
    full = AttentionSize(size.heads, size.key_value_heads, size.head_size, size.sequence)
    rows: list[tuple[str, ...]] = [
        ("functions", "window", "forward", "backward", "speed", "lowest", "highest")
    ]
    for each in results:
        speed = ["1", "", ""]
        if each.window:
            speed = [f"{statistic(each.speed):.2f}" for statistic in (median, min, max)]
        times = map(format_seconds, (each.forward_s, each.backward_s))
        rows.append((each.functions, str(each.window or "none"), *times, *speed))
    return [
        f"Attention of {size.sequence} positions, {heads}, {setting}",
        *table(rows),
        f"the window leaves {size.flops / full.flops:.1%} of the scores: speed at most "
        f"{full.flops / size.flops:.2f}",
    ]


def _functions(world: World) -> dict[str, LayerFunctions]:
    """Return all functions of attention that the world's devices have, by name. Collective."""
    functions = functions_of(choose_functions(gpt_deck(SMALL, 1, 256), world), world.device)
    return {"compiled": functions, "torch": TORCH} if functions.compiled else {"torch": TORCH}


def _pass_timer(
    functions: LayerFunctions, size: AttentionSize, window: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], Passes]:
    """Return a function that computes attention and its gradients once and returns the times."""
    rule, generator = AttentionRule(size.head_size**-0.5, window), torch.Generator(device).manual_seed(0)

    def normal(heads: int) -> torch.Tensor:
        values = torch.empty(size.sequence, 1, heads, size.head_size, dtype=dtype, device=device)
        return values.normal_(generator=generator)

    query, gradient = normal(size.heads).requires_grad_(), normal(size.heads)
    key, value = (normal(size.key_value_heads).requires_grad_() for _ in range(2))

    def passes() -> Passes:
        start = clock(device)
        attended = functions.attend(AttentionInputs(query, key, value), rule)
        middle = clock(device)
        torch.autograd.grad(attended, (query, key, value), gradient)
        return middle - start, clock(device) - middle

    return passes
