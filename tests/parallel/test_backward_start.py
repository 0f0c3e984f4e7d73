"""Backward passes that begin with a gradient that is given."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from hpctrain.parallel.backward.autograd import BackwardStart
from tests.conftest import ROOT, clean_environment


def test_gradients_are_those_of_torch() -> None:
    x = torch.randn(5, 3, requires_grad=True)
    gradient = torch.randn(5, 3)
    (wanted,) = torch.autograd.grad((x * x.sin()), x, gradient)
    BackwardStart(x * x.sin()).backward(gradient)
    assert x.grad is not None
    assert torch.equal(x.grad, wanted)
    y = torch.randn(4, requires_grad=True)
    BackwardStart(y.square().sum()).backward()
    assert y.grad is not None
    assert torch.equal(y.grad, 2 * y.detach())


def test_an_end_keeps_the_graph_and_not_the_tensor() -> None:
    x = torch.randn(4, requires_grad=True)
    y = x + 1
    kept = torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage())
    end = BackwardStart(y)
    del y
    assert kept.expired()
    end.backward(torch.ones(4))
    assert torch.equal(x.grad, torch.ones(4))


STEPS = """
import sys
from hpctrain.comm.world import World
from hpctrain.plan.libraries import library_bytes
from hpctrain.plan.memory_plan import plan_memory
from tests.engines import small_deck, trainer

world = World.start("cpu")
library_bytes()
before = {name.partition(".")[0] for name in sys.modules}
for recompute in ("none", "full", "selective"):
    deck = small_deck(f"memory.recompute={recompute}")
    plan_memory(deck, 1, 61)
    trainer(world, deck).train(2)
print(sorted({name.partition(".")[0] for name in sys.modules} - before - {"hpctrain", "tests"}))
"""


def test_steps_load_no_library_that_the_plan_has_not_counted(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    done = subprocess.run(
        [sys.executable, "steps.py"],
        cwd=tmp_path,
        env=clean_environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
