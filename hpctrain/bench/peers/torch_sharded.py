"""The same model cut over data ranks by others, over gloo: torch's FSDP2, and DeepSpeed's ZeRO.

DeepSpeed is no dependency: who compares with it installs it (`pip install deepspeed`).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from hpctrain.bench.peers.torch_model import TorchModel, loss_of
from hpctrain.bench.peers.torch_training import PeerRank, PeerStep, TorchTraining, TorchUpdate
from hpctrain.data.batches import MicroBatch
from hpctrain.deck.schema import Deck
from hpctrain.errors import require


def peer(name: str, deck: Deck, place: PeerRank, split: Sequence[int]) -> PeerStep:  # noqa: ARG001
    """One optimizer step of the deck's global batch by "fsdp2" or "deepspeed", on data ranks.

    Formats are as in our own: master weights and moments in fp32. HpctrainError where DeepSpeed is not there.
    """
    training = TorchTraining(deck, place.rank, place.size)
    model = training.filled(TorchModel(training.shape))
    return _fsdp2(training, place, model) if name == "fsdp2" else _deepspeed(name, training, place, model)


def _fsdp2(training: TorchTraining, place: PeerRank, model: TorchModel) -> PeerStep:
    """FSDP2 as torch's tutorial has it: every block, and what is around them, on its own."""
    mesh = init_device_mesh("cpu", (place.size,))
    policy = MixedPrecisionPolicy(param_dtype=training.storage, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert isinstance(model, FSDPModule) and isinstance(model, nn.Module)
    update = TorchUpdate(training, [model])
    once = training.deck.memory.accumulate == "whole"

    def backward(micro: MicroBatch, last: bool) -> Tensor:
        model.set_requires_gradient_sync(not once or last)
        loss = training.loss_share(model, micro)
        loss.backward()
        return loss

    return training.step(backward, update)


def _deepspeed(name: str, training: TorchTraining, place: PeerRank, model: TorchModel) -> PeerStep:
    """DeepSpeed's ZeRO, with its defaults, of the stage that ends the name, or else of the deck's
    `layout.zero`, 3 where that is 0.

    These sum the gradients of a 16-bit format in that format, which halves what travels.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(place.rank))
    require("deepspeed", f"--against {name}")
    deepspeed: Any = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    with contextlib.redirect_stdout(io.StringIO()):  # it tells of the operations that it builds
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    deck = training.deck
    stage = int(name.rpartition("-")[2]) if "-" in name else deck.layout.zero or 3
    settings = {
        "train_micro_batch_size_per_gpu": deck.batch.micro_size,
        "gradient_accumulation_steps": training.count,
        "gradient_clipping": deck.optimizer.clip,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": deck.precision.compute in ("bf16", "fp8")},
        "fp16": {"enabled": deck.precision.compute == "fp16"},
        "steps_per_print": 2**31,
    }
    optimizer = torch.optim.AdamW(training.groups(model.parameters()), **training.settings)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def backward(micro: MicroBatch, last: bool) -> Tensor:
        loss = loss_of(engine(micro.tokens), micro.targets)
        engine.backward(loss)
        if not last:
            engine.step()  # which counts micro-batches
        return loss / training.count

    def update() -> None:
        training.begin_update(optimizer.param_groups)
        engine.step()

    return training.step(backward, update)
