"""What a run says of itself before its first step and after its last one."""

from __future__ import annotations

from pathlib import Path

from hpctrain.deck.schema import Deck
from hpctrain.report.recorded import TRACE_FILE
from hpctrain.train.build import Corpus, Engine
from hpctrain.train.keeping import introduce_keeping
from hpctrain.units import format_bytes, format_count


def introduction(deck: Deck, engine: Engine, corpus: Corpus, peak: float) -> list[str]:
    """What will be trained, on what and how; `peak` is the FLOP/s of a rank."""
    shape, world, mesh = engine.shape, engine.world, engine.mesh
    axes = " x ".join(f"{axis} {mesh.size(axis)}" for axis in ("pipeline", "data", "context", "tensor"))
    lines = [
        f"{deck.run.title}: {shape.family}, {format_count(shape.parameters)} parameters, "
        f"{deck.precision.compute}, {counted(world.size, 'rank')} ({axes}) "
        f"on {counted(world.nodes, 'node')}",
        f"{deck.data.tokens}: {format_count(corpus.file.tokens)} tokens; a step takes "
        f"{format_count(deck.batch.global_size * deck.batch.sequence)}; "
        f"a matrix product runs at {peak / 1e9:.1f} GFLOP/s a rank (= 100% MFU)",
    ]
    if mesh.size("pipeline") > 1:
        lines.append(f"{deck.layout.schedule}: {engine.placement}")
    lines += introduce_keeping(deck, shape, engine.models, engine.plan, mesh.coordinate("pipeline"))
    return lines + ([engine.offload.introduction] if engine.offload.introduction else [])


def outcome(folder: Path, trace: bool, saved: Path | None, skipped: int) -> list[str]:
    """Where the files of a run are that has ended."""
    lines = [
        f"metrics     {folder / 'metrics.jsonl'} (`hpctrain plot {folder}` draws them)",
        f"trace       {folder / TRACE_FILE} (ui.perfetto.dev opens it)" if trace else "",
        f"checkpoint  {saved} ({format_bytes(saved.stat().st_size)})" if saved else "",
        f"skipped     {skipped} steps" if skipped else "",
    ]
    return [line for line in lines if line]


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
