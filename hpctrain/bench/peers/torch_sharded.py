"""Peers that shard the model over data-parallel ranks with gloo: FSDP2 of torch and ZeRO of DeepSpeed.

DeepSpeed is an optional dependency (`pip install deepspeed`).
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

from hpctrain.bench.peers.torch_model import TorchModel, mean_loss
from hpctrain.bench.peers.torch_training import PeerRank, PeerStep, TorchTraining, TorchUpdate
from hpctrain.data.batches import MicroBatch
from hpctrain.deck.schema import Deck
from hpctrain.errors import require


def peer(name: str, deck: Deck, peer_rank: PeerRank, split: Sequence[int]) -> PeerStep:  # noqa: ARG001
    """Return a function that trains one step, with master weights and moments in fp32.

    Args:
        name: "fsdp2", "deepspeed" or "deepspeed-STAGE".
        deck: Deck to train.
        peer_rank: Rank of this process.
        split: Not used.

    Raises:
        HpctrainError: DeepSpeed is not installed.
    """
    training = TorchTraining(deck, peer_rank.rank, peer_rank.size)
    model = training.initialize(TorchModel(training.shape))
    return (
        _fsdp2(training, peer_rank, model)
        if name == "fsdp2"
        else _deepspeed(name, training, peer_rank, model)
    )


def _fsdp2(training: TorchTraining, peer_rank: PeerRank, model: TorchModel) -> PeerStep:
    """Return a step with FSDP2 as in the tutorial of torch: each block is a unit, and the rest is another."""
    mesh = init_device_mesh("cpu", (peer_rank.size,))
    policy = MixedPrecisionPolicy(param_dtype=training.storage, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert isinstance(model, FSDPModule) and isinstance(model, nn.Module)
    update = TorchUpdate(training, [model])
    reduce_once = training.deck.memory.accumulate == "whole"

    def backward(micro: MicroBatch, last: bool) -> Tensor:
        model.set_requires_gradient_sync(not reduce_once or last)
        loss = training.loss_share(model, micro)
        loss.backward()
        return loss

    return training.step(backward, update)


def _deepspeed(name: str, training: TorchTraining, peer_rank: PeerRank, model: TorchModel) -> PeerStep:
    """Return a step with ZeRO of DeepSpeed and its default settings.

    The stage is that at the end of the name, otherwise `layout.zero` of the deck, or 3 if that is 0.
    DeepSpeed sums gradients of a 16-bit format in that format, which halves the traffic.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(peer_rank.rank))
    require("deepspeed", f"--against {name}")
    deepspeed: Any = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    with contextlib.redirect_stdout(io.StringIO()):  # hides messages on compiled operations
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    deck = training.deck
    stage = int(name.rpartition("-")[2]) if "-" in name else deck.layout.zero or 3
    config = {
        "train_micro_batch_size_per_gpu": deck.batch.micro_size,
        "gradient_accumulation_steps": training.count,
        "gradient_clipping": deck.optimizer.clip,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": deck.precision.compute in ("bf16", "fp8")},
        "fp16": {"enabled": deck.precision.compute == "fp16"},
        "steps_per_print": 2**31,
    }
    optimizer = torch.optim.AdamW(training.groups(model.parameters()), **training.adamw_settings)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def backward(micro: MicroBatch, last: bool) -> Tensor:
        loss = mean_loss(engine(micro.tokens), micro.targets)
        engine.backward(loss)
        if not last:
            engine.step()  # counts the micro-batches
        return loss / training.count

    def update() -> None:
        training.begin_update(optimizer.param_groups)
        engine.step()

    return training.step(backward, update)
