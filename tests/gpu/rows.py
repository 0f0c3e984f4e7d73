"""Rows of `make gpu-test`, in order, and the functions that they run: `python -m tests.gpu.rows NAME DEVICE`.

A function gets "cuda" or "cpu", works in the current folder, and returns the text of its result. It raises an
exception if the row failed. On CPUs models are small and process groups are those of gloo. Functions import
torch and hpctrain themselves, so that the list of rows can be read without them.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.gpu.run import Row

MACHINE = Path("machine.json")
"""File with the number of GPUs and the version of NCCL, which the row `versions` writes."""

NCCL_WITH_SHARED_GPUS = (2, 30)
"""First version of NCCL that lets ranks share a GPU."""

TOLERANCE = 1e-4
"""Largest relative difference of a loss in fp32 from that of one rank on the CPU."""

STEPS = 4

GPT = {
    "run": {"title": "gpt", "steps": STEPS},
    "model": {"family": "gpt2", "layers": 4, "hidden": 128, "heads": 4, "vocabulary": 512},
    "data": {"tokens": "corpus.h5"},
    "batch": {"global_size": 8, "sequence": 128},
    "learning_rate": {"peak": 3e-3, "warmup": 1},
}
MIXTURE = GPT | {
    "run": {"title": "mixture", "steps": STEPS},
    "model": {"family": "llama", "layers": 2, "hidden": 128, "heads": 4, "vocabulary": 512},
    "model.experts": {"count": 4, "per_token": 2, "mlp": 128},
}
DENSE = {
    "run": {"title": "dense", "steps": 100},
    "model": {
        "family": "llama",
        "layers": 16,
        "hidden": 2048,
        "heads": 32,
        "key_value_heads": 8,
        "mlp": 8192,
        "vocabulary": 32000,
        "tied": True,
    },
    "data": {"tokens": "corpus.h5"},
    "batch": {"global_size": 8, "micro_size": 4, "sequence": 2048},
    "precision": {"compute": "bf16"},
}
MEDIUM = DENSE | {
    "run": {"title": "medium", "steps": 2},
    "model": DENSE["model"] | {"layers": 12, "hidden": 1024, "heads": 16, "mlp": 2816},
    "learning_rate": {"warmup": 1},
}
SPARSE = DENSE | {
    "run": {"title": "sparse", "steps": 100},
    "model": MEDIUM["model"],
    "model.experts": {"count": 8, "per_token": 2, "mlp": 2816},
}
SMALL = {"layers": 2, "hidden": 64, "heads": 4, "key_value_heads": 2, "mlp": 128, "vocabulary": 512}
"""Sizes on CPUs of the models that are timed."""

LAYOUTS: Mapping[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "pipeline": (GPT, 4, ("layout.pipeline=4",)),
    "tensor-pipeline": (GPT, 4, ("layout.tensor=2", "layout.pipeline=2", "layout.sequence_parallel=true")),
    "zero-3": (GPT, 2, ("layout.zero=3",)),
    "ring": (GPT, 2, ("layout.context=2",)),
    "experts": (MIXTURE, 2, ("layout.expert=2",)),
}
"""Deck, number of ranks, and layout of the rows whose losses must be those of one rank on the CPU."""


def versions(device: str) -> str:
    """Return versions and names, after `hpctrain doctor`, and keep for other rows what NCCL allows."""
    import torch

    cuda = device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU here; use --device cpu")
    nccl = torch.cuda.nccl.version() if cuda else (0,)
    write_json(MACHINE.name, {"gpus": torch.cuda.device_count() if cuda else 0, "nccl": nccl})
    hpctrain("doctor")
    if not cuda:
        return f"torch {torch.__version__}, doctor found no problem"
    driver = run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0]
    name, number = torch.cuda.get_device_name(), ".".join(map(str, nccl))
    return f"{name}, driver {driver}, torch {torch.__version__}, NCCL {number}, doctor found no problem"


def corpus(device: str) -> str:
    """Prepare a token file from the guide, and train the references on one rank of the CPU."""
    hpctrain("guide", "--write", "texts")
    hpctrain("prepare", "corpus.h5", "texts", "--glob", "*.md", "--train-bpe", "512", "--force")
    losses = [train(deck, 1, "cpu", "reference")[-1]["loss"] for deck in (GPT, MIXTURE)]
    return "losses of the references: " + ", ".join(f"{loss:.4f}" for loss in losses)


def collectives(device: str) -> str:
    """Make each call that transports make of a process group, with one rank, which sends to itself."""
    import torch
    from torch.distributed import HashStore, ProcessGroupGloo, ReduceOp

    from hpctrain.comm.transports.nccl import connect_nccl
    from hpctrain.comm.transports.process_group import TIMEOUT

    cuda, place = device == "cuda", torch.device(device, 0)
    ranks = HashStore(), 0, 1
    group: Any = connect_nccl(*ranks, "one rank", place, False) if cuda else ProcessGroupGloo(*ranks, TIMEOUT)
    values = torch.arange(6.0, device=place)

    def message(values: torch.Tensor, output: torch.Tensor) -> Any:
        group._start_coalescing()
        group.send([values], 0, 0)
        group.recv([output], 0, 0)
        return group._end_coalescing()

    calls: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
        "all-reduce": lambda _, output: group.allreduce([output]),
        "reduce": lambda _, output: group.reduce(output, 0, ReduceOp.SUM),
        "broadcast": lambda _, output: group.broadcast(output, 0),
        "all-gather": lambda values, output: group._allgather_base(output, values),
        "reduce-scatter": lambda values, output: group._reduce_scatter_base(output, values),
    }
    calls |= {"message": message} if cuda else {}
    in_place = {"all-reduce", "reduce", "broadcast"}
    for dtype in (torch.float32, torch.bfloat16):
        for name, call in calls.items():
            source = values.to(dtype)
            output = source.clone() if name in in_place else torch.zeros_like(source)
            call(source, output).wait()
            if not torch.equal(output, source):
                raise AssertionError(f"{name} of {dtype}: {output.tolist()}")
    return f"{', '.join(calls)} in fp32 and bf16 are right"


def layout(name: str, device: str) -> str:
    """Train a layout, and compare its losses with those of one rank on the CPU."""
    deck, ranks, overrides = LAYOUTS[name]
    reference = metrics(f"{deck['run']['title']}-reference")
    transport = transport_of(device, ranks)
    rows = train(deck, ranks, device, name, *overrides, f"communication.transport={transport}")
    distance = max(
        abs(row["loss"] - other["loss"]) / other["loss"] for row, other in zip(rows, reference, strict=True)
    )
    text = f"losses differ by {distance:.1e} from the CPU's (limit {TOLERANCE:.0e}), over {transport}"
    if distance > TOLERANCE:
        raise AssertionError(text)
    return text


def generate(device: str) -> str:
    """Generate text on two pipeline stages, and compare it with that of one rank on the CPU."""
    transport = transport_of(device, 2)
    train(GPT, 1, device, "generate", f"communication.transport={transport}")
    arguments = "--prompt", "A rank", "--tokens", "24", "--temperature", "0"
    expected = hpctrain("generate", "runs/gpt-reference", *arguments, CUDA_VISIBLE_DEVICES="")
    text = hpctrain("generate", "runs/gpt-generate", *arguments, "--pipeline", "2", ranks=2)
    if text != expected:
        raise AssertionError(f"{text!r} instead of {expected!r}")
    return f"the same 24 tokens as one rank on the CPU, over {transport}"


def activations(device: str) -> str:
    """Train with activations kept on the device, in host memory and on disk: the same bits."""
    places = ("keep", "host", "disk") if device == "cuda" else ("keep", "disk")
    found = set()
    for place in places:
        rows = train(GPT, 1, device, f"activations-{place}", f"memory.activations={place}")
        found.add(tuple((row["loss"], row["grad_norm"]) for row in rows))
    if len(found) > 1:
        raise AssertionError(f"{len(found)} different results of {', '.join(places)}")
    return f"{', '.join(places)}: the same losses and norms of {STEPS} steps"


def grouped_products(device: str) -> str:
    """Multiply rows of experts, some or all of which are empty, and their gradients."""
    import torch

    from hpctrain.parallel.experts.grouped_products import Segments, add_grouped_gradient, grouped_product

    dtype, generator = torch.bfloat16, torch.Generator().manual_seed(1)
    for counts in ([0, 16, 0, 32, 0], [0, 0, 0], [0, 0, 48]):
        segments = Segments(torch.tensor(counts, device=device), 16)
        inputs, matrices, gradient = (
            torch.randn(shape, generator=generator).to(device, dtype)
            for shape in ((sum(counts), 64), (len(counts), 32, 64), (sum(counts), 32))
        )
        total = torch.zeros(matrices.shape, device=device)
        weight: Any = SimpleNamespace(
            requires_grad=True,
            gradient_to_overwrite=lambda: None,
            gradient=total,
            mark_gradient_added=lambda: None,
        )
        product = grouped_product(inputs, matrices, segments)
        add_grouped_gradient(gradient, inputs, weight, segments)
        first = 0
        for expert, count in enumerate(counts):
            rows = slice(first, first := first + count)
            expected = inputs[rows].float() @ matrices[expert].float().t()
            torch.testing.assert_close(product[rows].float(), expected, atol=0.1, rtol=2e-2)
            of_weight = gradient[rows].float().t() @ inputs[rows].float()
            torch.testing.assert_close(total[expert], of_weight, atol=0.1, rtol=2e-2)
    return "products and weight gradients are right with some and with all groups empty"


def synchronizations(device: str) -> str:
    """Count the synchronizations of the host with the GPU during one step."""
    import torch

    step = training_step(GPT, device)
    step()
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    places = Counter(
        f"{Path(each.filename).name}:{each.lineno}" for each in caught if "synchroniz" in str(each.message)
    )
    most = ", ".join(f"{place} ({count})" for place, count in places.most_common(5))
    micro = GPT["batch"]["global_size"]
    return f"{places.total()} in a step of {micro} micro-batches{': ' if most else ''}{most}"


def memory(device: str) -> str:
    """Train a model of 170 million parameters, and return the planned and the measured memory."""
    train(sized(MEDIUM, device), 1, device, "memory")
    plan = json.loads(Path("runs/medium-memory/plan.json").read_text(encoding="utf-8"))
    planned, measured = (
        each[0]["total_bytes"] / 1e9 for each in (plan["predicted"]["stages"], plan["measured"])
    )
    return f"{planned:.2f} GB planned, {measured:.2f} GB measured ({planned / measured - 1:+.1%})"


def speed(deck: dict[str, Any], device: str, *overrides: str) -> str:
    """Return MFU and tokens/s of a deck, by `hpctrain bench train`."""
    path = write_deck(sized(deck, device))
    settings = [argument for each in (f"run.device={device}", *overrides) for argument in ("--set", each)]
    hpctrain("bench", "train", str(path), *settings, "--steps", "3", "--rounds", "2", "--json", "speed.json")
    figures = json.loads(Path("speed.json").read_text(encoding="utf-8"))
    row = figures["rows"][0]
    rate = sorted(row["tokens_per_s"])[-1]
    return speed_text(row["mfu"], rate, figures["gemm_flops"])


def plain_torch(device: str) -> str:
    """Return MFU and tokens/s of the dense model in plain torch: DDP, bf16 autocast and torch.compile."""
    import torch

    from hpctrain.costs.layer_flops import model_flops
    from hpctrain.deck.read import read_deck
    from hpctrain.model.construction import architecture_of
    from hpctrain.watch.peak_flops import measure_gemm_flops
    from tests.gpu.peer import tokens_per_second

    tables, place = sized(DENSE, device), torch.device(device)
    deck = read_deck(write_deck(tables), ())
    peak = measure_gemm_flops(torch.bfloat16, place)
    rate = tokens_per_second(tables, place, 6)
    flops = model_flops(architecture_of(deck, deck.model.vocabulary or 0)).flops_per_token
    return speed_text(rate * flops / peak, rate, peak)


FUNCTIONS: Mapping[str, Callable[[str], str]] = {
    "versions": versions,
    "corpus": corpus,
    "collectives": collectives,
    "grouped-products": grouped_products,
    **{name: partial(layout, name) for name in LAYOUTS},
    "generate": generate,
    "activations": activations,
    "synchronizations": synchronizations,
    "memory": memory,
    "dense-bf16": partial(speed, DENSE),
    "dense-fp8": lambda device: speed(DENSE, device, "precision.compute=fp8"),
    "plain-torch": plain_torch,
    "mixture-bf16": partial(speed, SPARSE),
}

_MACHINE = ("versions",)
_CORPUS = ("versions", "corpus")

ROWS = (
    Row("versions", 60),
    Row("corpus", 60, needs=_MACHINE),
    Row("collectives", 40, needs=_MACHINE),
    Row("grouped-products", 30, needs=_MACHINE),
    *(Row(name, 60, needs=_CORPUS) for name in LAYOUTS),
    Row("generate", 60, needs=_CORPUS),
    Row("activations", 75, needs=_CORPUS),
    Row("synchronizations", 40, needs_gpu=True, needs=_MACHINE),
    Row("memory", 75, needs=_CORPUS),
    Row("dense-bf16", 90, needs=_MACHINE),
    Row("dense-fp8", 90, needs=_MACHINE),
    Row("plain-torch", 120, needs=_MACHINE),
    Row("mixture-bf16", 90, needs=_MACHINE),
)


def transport_of(device: str, ranks: int) -> str:
    """Return how ranks communicate: by NCCL if each has a GPU, or if NCCL lets ranks share one."""
    if device == "cpu":
        return "gloo"
    machine = json.loads(MACHINE.read_text(encoding="utf-8"))
    return "nccl" if machine["gpus"] >= ranks or nccl_version() >= NCCL_WITH_SHARED_GPUS else "mpi"


def nccl_version() -> tuple[int, ...]:
    """Return the version of NCCL that the row `versions` found; () before it has run."""
    return tuple(json.loads(MACHINE.read_text(encoding="utf-8"))["nccl"]) if MACHINE.exists() else ()


def train(deck: dict[str, Any], ranks: int, device: str, name: str, *overrides: str) -> list[dict[str, Any]]:
    """Run a deck, and return the rows of its metrics."""
    title = f"{deck['run']['title']}-{name}"
    keys = f"run.device={device}", f"run.title={title}", *overrides
    settings = [argument for key in keys for argument in ("--set", key)]
    hpctrain("run", str(write_deck(deck)), "--fresh", *settings, ranks=ranks)
    return metrics(title)


def metrics(title: str) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics."""
    lines = Path("runs", title, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def training_step(tables: dict[str, Any], device: str) -> Callable[[], float]:
    """Return a function that makes a training step on random tokens, on one rank."""
    from hpctrain.bench.training_speed import hpctrain_variant
    from hpctrain.comm.verb import single_world
    from hpctrain.deck.read import read_deck
    from hpctrain.engine.layout.run_mesh import make_mesh

    deck, world = read_deck(write_deck(tables), (f"run.device={device}",)), single_world(device)
    return hpctrain_variant("deck", deck, world, make_mesh(deck, world)).step


def sized(deck: dict[str, Any], device: str) -> dict[str, Any]:
    """Return a deck of a timed model, small on CPUs."""
    if device == "cuda":
        return deck
    small = deck | {
        "model": deck["model"] | SMALL,
        "batch": {"global_size": 4, "micro_size": 2, "sequence": 64},
    }
    return small | (
        {"model.experts": deck["model.experts"] | {"mlp": 128}} if "model.experts" in deck else {}
    )


def write_deck(tables: dict[str, Any]) -> Path:
    """Write a deck, and return its path."""
    path = Path(f"{tables['run']['title']}.toml")
    lines = list[str]()
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items()), ""]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def speed_text(mfu: float, tokens_per_s: float, peak: float) -> str:
    """Return a sentence about a speed. 100% MFU is the rate of large products in bf16 or fp8."""
    return f"{mfu:.1%} MFU, {tokens_per_s:,.0f} tokens/s; 100% are {peak / 1e12:.2f} TFLOP/s, measured"


def hpctrain(*arguments: str, ranks: int = 1, **variables: str) -> str:
    """Run hpctrain, on several ranks by the launcher, and return what it prints."""
    command = sys.executable, "-m", "hpctrain", *arguments
    return run(*(launcher(ranks) if ranks > 1 else ()), *command, **variables)


def launcher(ranks: int) -> Sequence[str]:
    """Return the launcher in $MPIRUN, or mpirun, with options that allow more ranks than cores."""
    program = shlex.split(os.environ.get("MPIRUN", "mpirun"))
    version = run(*program, "--version")
    open_mpi = "Open MPI" in version or "OpenRTE" in version
    return *program, *(("--oversubscribe", "--bind-to", "none") if open_mpi else ()), "-n", str(ranks)


def run(*command: str, **variables: str) -> str:
    """Run a command, copy its output to stderr, and return its stdout.

    Raises:
        RuntimeError: Its exit code is not 0.
    """
    sharing = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if nccl_version() >= NCCL_WITH_SHARED_GPUS else {}
    environment = os.environ | sharing | variables
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    print(done.stdout, file=sys.stderr)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode} of {shlex.join(command)}")
    return done.stdout


def write_json(name: str, value: object) -> None:
    """Write a value for other rows."""
    Path(name).write_text(json.dumps(value), encoding="utf-8")


def main() -> None:
    """Run one row, and print its result as the last line."""
    name, device = sys.argv[1:]
    print(FUNCTIONS[name](device), flush=True)


if __name__ == "__main__":
    main()
