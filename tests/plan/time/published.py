"""Decks of published measurements, and what the time of their steps is planned to be."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hpctrain.costs.layer_flops import model_flops
from hpctrain.deck.read import parse_deck
from hpctrain.deck.schema import Deck
from hpctrain.engine.layout.layer_placement import LayerPlacement, place_by_flops
from hpctrain.model.shape import ModelShape
from hpctrain.pipeline.action import Schedule
from hpctrain.plan.time.layer_seconds import layer_sizes
from hpctrain.plan.time.layout_sizes import LayoutSizes
from hpctrain.plan.time.machine_rates import MachineRates, read_machine
from hpctrain.plan.time.step_plan import step_seconds

RANKS_PER_NODE = 8


@dataclass(frozen=True)
class Published:
    """A row: whether machines were fitted to it, its deck, ranks, and the seconds of a step as measured."""

    fitted: bool
    name: str
    deck: Deck
    ranks: int
    vocabulary: int
    measured: float

    @cached_property
    def arrangement(self) -> LayoutSizes:
        return self.on(machine("selene-2021"))

    def on(self, machine: MachineRates) -> LayoutSizes:
        """Its ranks with the habits of a machine."""
        return LayoutSizes.of(machine.fill_deck(self.deck), self.ranks, RANKS_PER_NODE)

    @cached_property
    def shape(self) -> ModelShape:
        return ModelShape.of(self.deck, self.vocabulary)

    @cached_property
    def placement(self) -> LayerPlacement:
        return place_by_flops(self.deck, self.shape, self.arrangement.data)

    @cached_property
    def schedule(self) -> Schedule:
        return self.placement.schedule_of(self.arrangement.micro_batches)

    def causes(self, machine: MachineRates) -> Mapping[str, float]:
        """Seconds by cause."""
        return step_seconds(
            layer_sizes(self.shape), self.on(machine), self.schedule, self.placement.split, machine
        )

    def error(self, machine: MachineRates, *without: str) -> float:
        """How far the plan is off, as a share of what was measured, perhaps without some causes."""
        causes = self.causes(machine)
        return sum(seconds for cause, seconds in causes.items() if cause not in without) / self.measured - 1


def fitted(machine: MachineRates, row: Published, *without: str) -> MachineRates:
    """The machine whose products are as efficient as makes the plan of a row right."""
    low, high = 0.2, 3.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if row.error(efficient(machine, middle), *without) > 0 else (low, middle)
    return efficient(machine, low)


def efficient(machine: MachineRates, efficiency: float) -> MachineRates:
    """The machine with products that are as efficient."""
    products = {
        form: rates.model_copy(update={"efficiency": efficiency}) for form, rates in machine.products.items()
    }
    return machine.model_copy(update={"products": products})


def selene() -> Iterator[Published]:
    """SC21's tables 1 and 2, in TFLOP/s a GPU."""
    for row in _rows("selene"):
        deck = _deck(row, chunks=int(row["chunks"] or 1), recompute="full")
        ranks, counted = int(row["gpus"]), model_flops(ModelShape.of(deck, 51200))
        of_token = counted.flops_per_token + counted.recomputed_flops_per_token("full")
        flops = of_token * deck.batch.global_size * deck.batch.sequence
        seconds = flops / ranks / float(row["tflops"]) / 1e12
        yield Published(row["use"] == "fit", row["model"], deck, ranks, 51200, seconds)


def recompute_2022() -> Iterator[Published]:
    """Korthikanti et al. 2022, tables 3 and 5."""
    for row in _rows("recompute_2022"):
        deck = _deck(row, chunks=int(row["chunks"]), recompute=row["recompute"])
        name = f"{row['model']} {row['recompute']}"
        yield Published(row["use"] == "fit", name, deck, int(row["gpus"]), 51200, float(row["seconds"]))


def megascale_2024() -> Iterator[Published]:
    """Megatron-LM's rows of MegaScale's table 2."""
    sizes = {"layers": "96", "hidden": "12288", "heads": "128", "tensor": "8", "pipeline": "8", "micro": "1"}
    for row in _rows("megascale_2024"):
        deck = _deck(row | sizes, chunks=6, recompute="selective", vocabulary=64000)
        ranks = int(row["gpus"])
        yield Published(row["use"] == "fit", f"{ranks} GPUs", deck, ranks, 64000, float(row["seconds"]))


def megatron_deepspeed() -> Iterator[Published]:
    """vTrain's measurements of four models."""
    for row in _rows("megatron_deepspeed_a100"):
        deck = _deck(row, chunks=1, recompute="full")
        yield Published(
            True, row["billions"], deck, int(row["gpus"]), 51200, float(row["milliseconds"]) / 1000
        )


def megatron_deepspeed_one_node() -> Iterator[Published]:
    """vTrain's measurements of small models on up to 8 GPUs, in which nothing is computed again."""
    for row in _rows("megatron_deepspeed_a100_one_node"):
        deck = _deck(row, chunks=1, recompute="none", sequence=1024)
        ranks, seconds = int(row["gpus"]), float(row["milliseconds"]) / 1000
        yield Published(False, f"hidden {row['hidden']}", deck, ranks, 51200, seconds)


def machine(name: str) -> MachineRates:
    """A published one."""
    return read_machine(name)


def _rows(name: str) -> list[dict[str, str]]:
    lines = (Path(__file__).parent / f"{name}.csv").read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def _deck(
    row: Mapping[str, str], chunks: int, recompute: str, vocabulary: int = 51200, sequence: int = 2048
) -> Deck:
    schedule = "interleaved" if chunks > 1 else "1f1b"
    return parse_deck(f"""
[run]
title = "published"
steps = 1
[model]
family = "gpt2"
layers = {row["layers"]}
hidden = {row["hidden"]}
heads = {row["heads"]}
vocabulary = {vocabulary}
dropout = 0.1
[data]
tokens = "none.h5"
[layout]
tensor = {row["tensor"]}
pipeline = {row["pipeline"]}
schedule = "{schedule}"
chunks = {chunks}
sequence_parallel = {str(recompute == "selective").lower()}
[batch]
global_size = {row["batch"]}
micro_size = {row["micro"]}
sequence = {sequence}
[precision]
compute = "fp16"
[memory]
recompute = "{recompute}"
""")
