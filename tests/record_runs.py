"""Record what runs compute, bit by bit, and compare it with what another version of hpctrain computed.

    python -m tests.record_runs before.json
    ... change code that must not change results ...
    python -m tests.record_runs after.json
    python -m tests.record_runs --compare before.json after.json

Everything passes through the command line and the files of a run folder, so that the recorder also works with
versions whose modules have other names (`--hpctrain PATH` chooses the program). Recorded are losses, gradient
norms and other metrics of each step, a checksum of every tensor of the checkpoints, bytes and calls of the
ledger, and the plan's bytes. Seconds, and memory that depends on libraries, are left out. Results depend on
the CPU: both records have to be made on the same kind of machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import h5py

from tests.launch import ROOT, clean_environment, launcher

STEPS = 3
TIMED_METRICS = {"seconds", "tokens_per_s", "mfu", "peak_rss_bytes", "peak_bytes"}
"""Columns of metrics.jsonl that depend on the machine, besides those whose name ends in `TIMED_SUFFIXES`."""
TIMED_SUFFIXES = ("seconds", "_per_s", "_rss_bytes")
PLANNED_BYTES = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "cache_bytes")
TIMED_CASES = {"inputs/server.toml"}
"""Cases whose results depend on the order in which workers finish."""
OTHER_DATASETS = {"deck", "state", "checksums"}
"""Datasets of a checkpoint that describe the run and hold times, not tensors."""

DECK = """
[run]
title = "recorded"
steps = {steps}
evaluate_every = 2
evaluate_sequences = 4
dir = "run"
[model]
family = "gpt2"
layers = 2
hidden = 32
heads = 4
[data]
tokens = "{tokens}"
validation = 0.2
[batch]
global_size = 8
micro_size = 2
sequence = 32
[learning_rate]
peak = 1e-2
warmup = 1
[machine]
peak_flops = 1e10
memory = "32 GB"
"""

LLAMA = ("model.family=llama", "model.key_value_heads=2", "model.mlp=48")
MIXTURE = (*LLAMA, "model.experts.count=4", "model.experts.mlp=32")
MUON = ("optimizer.name=muon", 'optimizer.muon.matrices=["blocks.*"]')
FOUR_LAYERS = "model.layers=4"
TENSOR, SEQUENCE = "layout.tensor=2", "layout.sequence_parallel=true"
RING, ALL_TO_ALL = (("layout.context=2", f"layout.context_form={form}") for form in ("ring", "all_to_all"))
PIPELINE = "layout.pipeline=2"


@dataclass(frozen=True)
class Case:
    """One run: a deck of `inputs/`, or `DECK` with changes, on a number of ranks."""

    name: str
    ranks: int
    changes: tuple[str, ...] = ()
    deck: str = ""
    """File name in `inputs/`; empty for `DECK`."""
    tokens: str = "text"
    """Kind of the token file: "text", "chat", "preferences" or "prompts"."""


def cases() -> Iterator[Case]:
    """Yield all cases."""
    for family, keys in (("gpt2", ()), ("llama", LLAMA)):
        yield from (Case(f"{family} {name}", ranks, (*keys, *changes)) for name, ranks, changes in LAYOUTS)
    yield from (Case(name, ranks, changes) for name, ranks, changes in FEATURES)
    yield from (
        Case(f"{kind} on {ranks}", ranks, (*LLAMA, *changes), tokens=tokens)
        for kind, tokens, changes in OBJECTIVES
        for ranks in (1, 2)
    )
    for path in sorted((ROOT / "inputs").glob("*.toml")):
        if f"inputs/{path.name}" in TIMED_CASES:
            continue
        yield Case(f"inputs/{path.name}", _ranks_of(path), deck=path.name)


LAYOUTS: list[tuple[str, int, tuple[str, ...]]] = [
    ("one rank", 1, ()),
    ("dropout", 1, ("model.dropout=0.1",)),
    ("recompute", 1, ("memory.recompute=full",)),
    ("bf16", 1, ("precision.compute=bf16",)),
    ("data", 2, ()),
    ("zero 1", 2, ("layout.zero=1",)),
    ("zero 2 bf16", 2, ("layout.zero=2", "precision.compute=bf16")),
    ("zero 3", 2, ("layout.zero=3",)),
    ("zero 3 fp16", 2, ("layout.zero=3", "precision.compute=fp16")),
    ("tensor", 2, (TENSOR,)),
    ("tensor, sequence", 2, (TENSOR, SEQUENCE)),
    ("tensor, sequence, dropout", 2, (TENSOR, SEQUENCE, "model.dropout=0.1")),
    ("ring", 2, (*RING,)),
    ("all-to-all", 2, (*ALL_TO_ALL,)),
    ("1F1B", 2, (PIPELINE,)),
    ("interleaved", 2, (PIPELINE, FOUR_LAYERS, "layout.schedule=interleaved", "layout.chunks=2")),
    ("zero bubble", 2, (PIPELINE, "layout.schedule=zb-h1")),
    ("zero bubble V", 2, (PIPELINE, FOUR_LAYERS, "layout.schedule=zb-v")),
    ("tensor, data, zero 1", 4, (TENSOR, SEQUENCE, "layout.zero=1")),
    ("tensor, pipeline, bf16", 4, (TENSOR, PIPELINE, "precision.compute=bf16")),
    ("ring, pipeline", 4, (*RING, PIPELINE)),
    ("ring, data, zero 3", 4, (*RING, "layout.zero=3")),
]
"""Name, number of ranks and changes of layouts that both families run."""

FEATURES: list[tuple[str, int, tuple[str, ...]]] = [
    ("mixture", 1, MIXTURE),
    ("mixture, experts", 2, (*MIXTURE, "layout.expert=2")),
    ("mixture, tensor", 2, (*MIXTURE, TENSOR, SEQUENCE)),
    ("mixture, experts, pipeline", 4, (*MIXTURE, "layout.expert=2", PIPELINE)),
    ("mixture, shared", 2, (*MIXTURE, "model.experts.shared=1", "layout.zero=2")),
    ("muon", 2, MUON),
    ("muon, tensor", 2, (*MUON, TENSOR)),
    ("muon, zero 3", 2, (*MUON, "layout.zero=3")),
    *(
        (name, 2, (f"optimizer.name={name}",))
        for name in ("sgd", "lion", "adafactor", "adam-mini", "schedule-free")
    ),
    *(
        (f"fp8 {name}", 1, (*LLAMA, f"precision.fp8={name}", "precision.compute=fp8"))
        for name in ("delayed", "tensor", "row")
    ),
    ("fp8, tensor", 2, (*LLAMA, "precision.compute=fp8", TENSOR, SEQUENCE)),
    *((f"{name}", 2, (f"communication.compress={name}",)) for name in ("int8", "topk", "powersgd")),
    ("onebit", 2, ("communication.compress=onebit", "communication.warmup=1")),
    ("offload", 2, ("memory.optimizer=disk", "layout.zero=2")),
    ("adapters", 2, (*LLAMA, "model.adapters.rank=2")),
]
"""Name, number of ranks and changes of one feature each."""

OBJECTIVES: list[tuple[str, str, tuple[str, ...]]] = [
    ("SFT", "chat", ("batch.sequence=96",)),
    ("DPO", "preferences", ("objective.kind=dpo",)),
    ("reward", "preferences", ("objective.kind=reward",)),
    (
        "GRPO",
        "prompts",
        (
            "objective.kind=grpo",
            "objective.beta=0.1",
            'policy.reward=["exact-match"]',
            "policy.tokens=4",
            "policy.samples=2",
        ),
    ),
]
"""Name, kind of token file and changes of post-training."""


def _ranks_of(path: Path) -> int:
    """Return the number of ranks in the command that a deck's comment gives."""
    lines = path.read_text(encoding="utf-8").splitlines()
    (command,) = (line for line in lines if line.startswith("#   mpirun -n ") and path.name in line)
    return int(command.split()[3])


class Recorder:
    """Runs cases in a temporary folder and collects their results."""

    def __init__(self, program: str, folder: Path) -> None:
        self.program = program
        self.folder = folder
        self.environment = clean_environment()
        del self.environment["PYTHONPATH"]  # the program must import its own version of hpctrain

    def prepare(self) -> None:
        """Write the token files that all cases share."""
        text = "".join(f"{n * n % 997} lines of text\n" for n in range(8000))
        (self.folder / "text.txt").write_text(text)
        rows = {
            "chat": [
                {
                    "messages": [
                        {"role": "user", "content": "q" * (n % 5)},
                        {"role": "assistant", "content": f"{n}"},
                    ]
                }
                for n in range(80)
            ],
            "preferences": [
                {"prompt": f"p{n}", "chosen": "yes" * (n % 3 + 1), "rejected": "no"} for n in range(80)
            ],
            "prompts": [{"prompt": f"p{n}", "answer": "a"} for n in range(80)],
        }
        self._call("prepare", "text.h5", "text.txt")
        for kind, each in rows.items():
            (self.folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))
            template = () if kind == "chat" else ("--template", "raw")
            chosen = ("--template", "chatml") if kind == "chat" else template
            self._call("prepare", f"{kind}.h5", f"{kind}.jsonl", f"--{kind}", *chosen)

    def _call(self, *arguments: str, ranks: int = 1, folder: Path | None = None) -> str:
        """Run the program, and return what it prints; raise RuntimeError with its output where it fails."""
        start = launcher(ranks) if ranks > 1 else []
        done = subprocess.run(
            [*start, self.program, *arguments],
            cwd=folder or self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-1500:]}{done.stdout[-500:]}")
        return done.stdout

    def record(self, case: Case) -> dict[str, Any]:
        """Run a case and return its record; a run that fails has the error as its record."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        # Older versions did not compile by default.
        changes = ["machine.compile=false", *case.changes, "run.dir=run"]
        deck = ROOT / "inputs" / case.deck
        if not case.deck:
            deck = folder / "deck.toml"
            deck.write_text(DECK.format(tokens=self.folder / f"{case.tokens}.h5", steps=STEPS))
        else:
            changes += [f"run.steps={STEPS}", "learning_rate.warmup=1", "run.evaluate_sequences=4"]
            changes += ["machine.peak_flops=1e10", "machine.memory=32 GB"]
            if "\ndataset" not in deck.read_text(encoding="utf-8"):
                changes.append(f"data.tokens={self.folder}/text.h5")
        words = [word for change in changes for word in ("--set", change)]
        try:
            self._call("run", str(deck), "--fresh", *words, ranks=case.ranks, folder=folder)
            return dict(results(folder / "run"))
        except (RuntimeError, OSError) as error:
            return {"error": str(error)}


def results(run: Path) -> Iterator[tuple[str, Any]]:
    """Yield what a run folder records that has to stay the same, by name."""
    for row in map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()):
        for name, value in row.items():
            if name not in TIMED_METRICS and not name.endswith(TIMED_SUFFIXES):
                yield f"step {row['step']} {name}", value
    yield from ledger_sums(json.loads((run / "ledger.json").read_text(encoding="utf-8")))
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    for stage in plan["predicted"]["stages"]:
        yield f"plan stage {stage['stage']}", {name: stage[name] for name in PLANNED_BYTES if name in stage}
    for path in sorted((run / "checkpoints").glob("*.h5")):
        yield from ((f"{path.name} {name}", value) for name, value in checksums(path))


def ledger_sums(entries: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[int]]]:
    """Yield calls and bytes by axis and operation. In which phase a receive is counted depends on timing."""
    sums: dict[str, list[int]] = {}
    for entry in entries:
        total = sums.setdefault(f"ledger {entry['axis']} {entry['operation']}", [0, 0])
        total[0] += entry["calls"]
        total[1] += entry["bytes"]
    yield from sums.items()


def checksums(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the type, shape and CRC-32 of each tensor of a checkpoint."""
    with h5py.File(path, "r") as file:
        found: list[tuple[str, str]] = []

        def add(name: str, item: object) -> None:
            if isinstance(item, h5py.Dataset) and name not in OTHER_DATASETS:
                found.append((name, f"{item.dtype} {item.shape} {crc32(item[()].tobytes()):08x}"))

        file.visititems(add)
    yield from found


def differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each value that two records do not share, at most three for each case."""
    for case in sorted(before.keys() | after.keys()):
        old, new = before.get(case, {}), after.get(case, {})
        names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
        for name in names[:3]:
            yield f"{case}: {name}: {old.get(name)} -> {new.get(name)}"
        if len(names) > 3:
            yield f"{case}: {len(names) - 3} more"


def main(words: Sequence[str]) -> int:
    """Record or compare; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, help="the record to write, or two to compare")
    parser.add_argument("--compare", action="store_true", help="compare two records")
    parser.add_argument("--only", default="", help="record only cases whose name contains this")
    parser.add_argument(
        "--hpctrain", default=str(Path(sys.executable).parent / "hpctrain"), help="program to run"
    )
    options = parser.parse_args(words)
    if options.compare:
        before, after = (json.loads(path.read_text(encoding="utf-8")) for path in options.files)
        lines = list(differences(before, after))
        print("\n".join([*lines, f"{len(before)} and {len(after)} cases, {len(lines)} differences"]))
        return int(bool(lines))
    chosen = [case for case in cases() if options.only in case.name]
    with tempfile.TemporaryDirectory(prefix="hpctrain-record-") as folder, ThreadPoolExecutor(2) as pool:
        recorder = Recorder(options.hpctrain, Path(folder))
        recorder.prepare()
        records = dict(zip((case.name for case in chosen), pool.map(recorder.record, chosen), strict=True))
    (path,) = options.files
    path.write_text(json.dumps(records, indent=1, sort_keys=True), encoding="utf-8")
    failed = {name: record["error"] for name, record in records.items() if "error" in record}
    print("\n".join(f"{name}: {error}" for name, error in failed.items()))
    print(f"{len(records)} cases, {len(failed)} failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
