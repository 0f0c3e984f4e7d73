"""`hpctrain calibrate`: measurement of the rates of this machine by all ranks at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter

import torch

from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.files import require_writable, write_atomically
from hpctrain.host.device import gpu_name, on_host
from hpctrain.host.processor import processor_name
from hpctrain.parallel.vocabulary import chunk_logits
from hpctrain.plan.calibrate.block_rates import TimedBlocks, block_factor, launch_seconds, scale_block_rates
from hpctrain.plan.calibrate.calibration_decks import SMALL, TINY, gpt_deck, measured_decks
from hpctrain.plan.calibrate.clock import Clock
from hpctrain.plan.calibrate.link_rates import measure_links
from hpctrain.plan.calibrate.machine_file import machine_text, rounded
from hpctrain.plan.calibrate.matmul_rates import measure_products
from hpctrain.plan.calibrate.memory_rates import measure_bandwidth, measure_prepared_product, memory_of_rank
from hpctrain.plan.calibrate.operation_rates import measure_attention, measure_elementwise
from hpctrain.plan.calibrate.rate_fit import fit_products
from hpctrain.plan.calibrate.step_rates import (
    MOST_PARAMETERS,
    measure_fixed,
    measure_optimizer,
    parameters_of,
)
from hpctrain.plan.time.machine_rates import FormatRates, MachineRates, ProductRates
from hpctrain.text import counted, either
from hpctrain.units import format_bytes, format_seconds, parse_bytes

FORMATS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class CalibrateOptions:
    """Options of a calibration.

    Attributes:
        decks: Decks whose shapes are measured; () for a small and a larger GPT.
        formats: Formats, separated by commas.
        most: Size of the largest message.
        seconds: Seconds for which a measurement is repeated.
    """

    decks: tuple[Path, ...] = ()
    formats: str = "fp32,bf16"
    most: str = "1 GiB"
    seconds: float = 0.1

    def format_names(self) -> list[str]:
        """Return the formats.

        Raises:
            HpctrainError: A format is not supported.
        """
        names = [name.strip() for name in self.formats.split(",")]
        wrong = [name for name in names if name not in FORMATS]
        if wrong:
            raise HpctrainError(f"--formats {', '.join(wrong)}: must be {either(FORMATS)}")
        return list(dict.fromkeys(names))

    def most_bytes(self) -> int:
        """Return the bytes of the largest message.

        Raises:
            HpctrainError: They are too few.
        """
        most = parse_bytes(self.most)
        if most < 1024:
            raise HpctrainError(f"--max-bytes {self.most}: must be at least 1 KiB")
        return most


Report = Callable[[str], None]

WIDE_SPREAD = 1.5
"""Ratio of slow to fast measurements above which rates are doubtful."""


def spread_warnings(spread: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return a sentence for each kind of measurements that differ too much among themselves.

    Args:
        spread: By kind, the shares of the median below which one tenth and nine tenths of them were.
    """
    ratios = {kind: high / low for kind, (low, high) in spread.items() if low > 0}
    return [
        f"{kind}: slow measurements took {ratio:.2g} times as long as fast ones (limit: "
        f"{WIDE_SPREAD}); predictions have the same uncertainty (measure again on an idle machine)"
        for kind, ratio in ratios.items()
        if ratio > WIDE_SPREAD
    ]


def calibrate(world: World, path: Path, options: CalibrateOptions, report: Report = print) -> None:
    """Measure the rates of this machine, report them on rank 0, and write them to a file. Collective.

    Args:
        world: All ranks.
        path: File to write.
        options: Options of the calibration.
        report: Function that shows a line.

    Raises:
        HpctrainError: A deck, a format or a size is wrong. Nothing has been measured.
        InputOutputError: The file cannot be written.
    """
    world.ledger.activity = "measuring this machine"
    with world.agreement():
        if world.rank == 0:
            require_writable(path)
        decks, formats, most = measured_decks(options.decks), options.format_names(), options.most_bytes()
    torch.set_num_threads(decks[0].run.threads)
    machine = measure_machine(
        world, path.stem, decks, formats, most, options.seconds, _on_rank_0(world, report)
    )
    with world.agreement():
        if world.rank == 0:
            write_atomically(path, machine_text(machine))
    if world.rank == 0:
        for warning in spread_warnings(machine.spread):
            report(f"warning: {warning}")
        report(f"Machine rates: {path} (use with `hpctrain plan DECK --machine {path}`)")


def _on_rank_0(world: World, report: Report) -> Report:
    return report if world.rank == 0 else lambda _: None


def measure_machine(
    world: World,
    name: str,
    decks: list[Deck],
    formats: list[str],
    most: int,
    seconds: float,
    report: Report = lambda _: None,
) -> MachineRates:
    """Return the rates of the machine, which are the same on all ranks. Collective.

    Args:
        world: All ranks.
        name: Name of the machine.
        decks: Decks whose shapes are measured.
        formats: Formats of computation.
        most: Bytes of the largest message.
        seconds: Seconds for which a measurement is repeated.
        report: Function that shows a line.
    """
    clock, start = Clock(world, seconds), perf_counter()
    processor = gpu_name(world.device) or processor_name()
    report(
        f"Measuring {processor} with {counted(world.size, 'rank')}. This takes about a minute, and "
        "longer with more formats, larger models or a busy machine."
    )
    # This comes first: later, prepared products could reuse freed memory, so that the process would not grow.
    prepared = measure_prepared_product(world, torch.bfloat16) if "bf16" in formats else None
    if prepared is not None:
        report(f"memory of a prepared 16-bit product: {format_bytes(prepared)}")
    bandwidth = measure_bandwidth(clock, most)
    report(f"memory bandwidth: {format_bytes(bandwidth)}/s per rank")
    links = measure_links(clock, most)
    for where, link in (("inside nodes", links.inside), ("between nodes", links.between)):
        if link is not None:
            report(f"links {where}: {format_bytes(link.bandwidth)}/s, latency {1e6 * link.latency:.1f} us")
    products: dict[str, ProductRates] = {}
    format_rates: dict[str, FormatRates] = {}
    blocks: dict[str, TimedBlocks] = {}
    measured: dict[str, list[float]] = {}
    memory = memory_of_rank(world)
    small = min(decks, key=parameters_of)
    if parameters_of(small) > MOST_PARAMETERS:
        small = gpt_deck(SMALL, 4, 256)
    tiny = gpt_deck(TINY, 1, 32).with_keys(precision={"compute": formats[0]})
    for form in formats:
        format_decks = [deck.with_keys(precision={"compute": form}) for deck in decks]
        blocks[form] = TimedBlocks.of(format_decks, world.size, memory)
        measured[form] = blocks[form].seconds(clock)
        products[form] = fit_products(measure_products(format_decks, clock))
        format_rates[form] = FormatRates(
            attention=measure_attention(format_decks, clock),
            elementwise=measure_elementwise(format_decks, clock),
            optimizer=measure_optimizer(small.with_keys(precision={"compute": form}), clock),
        )
        report(_format_line(form, products[form], format_rates[form]))
    first = format_rates[formats[0]]
    assert first.attention is not None
    machine = MachineRates(
        name=name,
        source="measured by hpctrain calibrate",
        processor=processor,
        date=datetime.now(timezone.utc).date().isoformat(),
        ranks=world.size,
        ranks_per_node=world.topology.ranks_per_node,
        memory=memory,
        memory_bandwidth=bandwidth,
        prepared_product=prepared,
        optimizer=first.optimizer,
        products=products,
        attention=first.attention,
        elementwise=first.elementwise,
        formats={form: format_rates[form] for form in formats[1:]},
        logits=float(chunk_logits(not on_host(world.device))),
        shared_memory=on_host(world.device) and not world.share_memory(),
        gpu=not on_host(world.device),
        inside=links.inside,
        between=links.between,
        collectives=links.collectives,
        crossing=links.crossing,
        overlap=links.overlap,
        layer_overlap=links.layer_overlap,
        waits=links.waits,
    )
    machine = _scale_to_blocks(machine, blocks, measured, clock, report)
    fixed = measure_fixed(tiny, machine, clock)
    report(f"fixed time per step: {format_seconds(fixed)}")
    report(f"Measured in {perf_counter() - start:.0f} s.")
    update = {"fixed": fixed, "spread": clock.spread()}
    result: MachineRates = world.everyone.broadcast_object(rounded(machine.model_copy(update=update)))
    return result


def _scale_to_blocks(
    machine: MachineRates,
    blocks: Mapping[str, TimedBlocks],
    before: Mapping[str, list[float]],
    clock: Clock,
    report: Report,
) -> MachineRates:
    """Return rates that are scaled to the times of complete blocks, which are measured again. Collective."""
    tiny = gpt_deck(TINY, 1, 32).with_keys(precision={"compute": next(iter(blocks))})
    tiny_blocks = TimedBlocks.of([tiny], clock.world.size, machine.memory)
    launch = launch_seconds(tiny_blocks, tiny_blocks.seconds(clock), machine)
    machine = machine.model_copy(update={"launch": launch})
    report(f"minimum time per operation: {1e6 * launch:.3g} us")
    for form, some in blocks.items():
        factor = block_factor(some, [before[form], some.seconds(clock)], machine)
        machine = scale_block_rates(machine, form, factor)
        report(f"{form}: a block takes {factor:.3f} times the sum of its separately measured parts")
    return machine


def _format_line(form: str, products: ProductRates, rates: FormatRates) -> str:
    large = products.peak * products.efficiency / (1 + products.saturation * 3 / 1024)
    assert rates.attention is not None
    forward, backward = rates.attention.forward or 0.0, rates.attention.backward or 0.0
    return (
        f"{form}: matrix products 1024 x 1024 x 1024 {large / 1e9:.4g} GFLOP/s, attention "
        f"{forward / 1e9:.3g} GFLOP/s forward and {backward / 1e9:.3g} backward, optimizer "
        f"{(rates.optimizer or 0.0) / 1e6:.3g}M elements/s"
    )
