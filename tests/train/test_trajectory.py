"""Twenty steps of a run against a plain torch loop: `transformers`, `torch.optim.AdamW`, torch's clipping.

Nothing of ours is in that loop but the numbers of the samples. It computes in double precision, from the same
weights, of which no two tensors are alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from math import cos, pi
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from hpctrain.comm.world import World
from hpctrain.data.order import SampleOrder
from hpctrain.train.run import run_deck
from tests.data.preparing import prepare
from tests.model.test_against_transformers import gpt2_names, gpt2_reference, llama_names, llama_reference

STEPS, BATCH, SEQUENCE, SEED = 20, 6, 24, 7
PEAK, WARMUP, FLOOR, CLIP, DECAY = 3e-3, 4, 0.1, 0.7, 0.1
BETAS, EPSILON = (0.9, 0.95), 1e-6
DECK = f"""
[run]
title = "trajectory"
steps = {STEPS}
seed = {SEED}
[model]
from = "{{folder}}/theirs"
[data]
tokens = "{{folder}}/tokens.h5"
validation = 0.0
[batch]
global_size = {BATCH}
micro_size = 3
sequence = {SEQUENCE}
[learning_rate]
peak = {PEAK}
warmup = {WARMUP}
floor = {FLOOR}
[optimizer]
clip = {CLIP}
weight_decay = {DECAY}
beta1 = {BETAS[0]}
beta2 = {BETAS[1]}
epsilon = {EPSILON}
[communication]
bucket_bytes = 20000
[machine]
peak_flops = 1e10
"""
MODELS = {"gpt2": (gpt2_reference, gpt2_names), "llama": (llama_reference, llama_names)}
LAYOUTS = {
    "gpt2": {
        "data": (),
        "tensor": ("layout.tensor=2", "layout.sequence_parallel=true"),
        "pipeline": ("layout.pipeline=2", "layout.schedule=zb-h1"),
    },
    "llama": {
        "zero": ("layout.zero=3", "memory.recompute=full"),
        "context": ("layout.context=2", "layout.zero=1"),
    },
}

Names = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def rate(step: int) -> float:
    """Linear warm-up, then a cosine down to a share of the peak; steps from 0."""
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    done = (step - WARMUP) / (STEPS - WARMUP)
    return PEAK * (FLOOR + (1 - FLOOR) * (1 + cos(pi * done)) / 2)


def reference(model: torch.nn.Module, names: Names, tokens: torch.Tensor) -> tuple[list[list[float]], dict]:
    """Loss and gradient norm of each step, and the last weights under our names."""
    model = model.double().train()
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=EPSILON)
    order = SampleOrder((len(tokens) - 1) // SEQUENCE, SEED)
    figures = []
    for step in range(STEPS):
        samples = order.at(np.arange(step * BATCH, (step + 1) * BATCH)).tolist()
        windows = torch.stack([tokens[i * SEQUENCE : (i + 1) * SEQUENCE + 1] for i in samples])
        logits = model(windows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        figures.append([loss.item(), norm.item()])
    return figures, names(dict(model.named_parameters()))


@pytest.mark.sampled(1)
@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("family", MODELS)
def test_a_run_takes_the_steps_of_a_plain_loop(world: World, mpi_tmp_path: Path, family: str) -> None:
    make, names = MODELS[family]
    torch.manual_seed(11)
    model, _ = make()
    model.resize_token_embeddings(257)  # of bytes, and the end of a document
    if world.rank == 0:
        model.save_pretrained(mpi_tmp_path / "theirs")
        (mpi_tmp_path / "deck.toml").write_text(DECK.format(folder=mpi_tmp_path))
        (mpi_tmp_path / "text.txt").write_text("".join(chr(32 + 7 * n * n % 61) for n in range(4000)))
    world.everyone.barrier()
    prepare(world, mpi_tmp_path / "tokens.h5", [str(mpi_tmp_path / "text.txt")])
    for name, layout in LAYOUTS[family].items():
        run_deck(world, mpi_tmp_path / "deck.toml", [f"run.dir={mpi_tmp_path / name}", *layout])
    world.everyone.barrier()
    if world.rank:
        return
    with h5py.File(mpi_tmp_path / "tokens.h5") as file:
        tokens = torch.from_numpy(file["tokens"][()].astype(np.int64))
    assert len(tokens) == 4001
    figures, weights = reference(model, names, tokens)
    for name in LAYOUTS[family]:
        rows = [json.loads(row) for row in (mpi_tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        found = [[row["loss"], row["grad_norm"]] for row in rows]
        np.testing.assert_allclose(found, figures, rtol=2e-6, err_msg=name)
        assert [row["lr"] for row in rows] == pytest.approx([rate(step) for step in range(STEPS)])
        with h5py.File(mpi_tmp_path / name / f"checkpoints/step-{STEPS:08}.h5") as file:
            for key, expected in weights.items():
                ours, theirs = file[f"model/{key}"][()], expected.detach().numpy()
                assert abs(ours - theirs).max() <= 2e-5 * abs(theirs).max(), (name, key)
