"""The same model cut over data ranks by others, over gloo: torch's FSDP2, and DeepSpeed's ZeRO.

DeepSpeed is no dependency: who compares with it installs it (`pip install deepspeed`).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from hpctrain.bench.torch_model import TorchModel, loss_of
from hpctrain.comm.world import World
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.model.precision import Precision
from hpctrain.model.shape import ModelShape

LEARNING_RATE = 1e-4


def sharded_step(name: str, deck: Deck, world: World) -> Callable[[], Tensor]:
    """One optimizer step of the deck's global batch by one of SHARDED_RIVALS, on data ranks only.

    The step gives the mean loss of this rank's tokens, which are always the same. Formats are as in our
    own: master weights and moments in fp32. Clipping is left out, to the rival's
    advantage. HpctrainError for a deck with other ranks than data ranks, one that the rival cannot do, and
    where it is not installed.
    """
    assert deck.model.vocabulary is not None
    layout = deck.layout
    if max(layout.tensor, layout.context, layout.pipeline) > 1:
        raise HpctrainError(f"--against {name}: needs a deck of data ranks only")
    shape = ModelShape.of(deck, deck.model.vocabulary)
    torch.manual_seed(deck.run.seed)
    step = SHARDED_RIVALS[name](deck, world, TorchModel(shape))
    micro = deck.batch.micro_size
    count, rest = divmod(deck.batch.global_size, micro * world.size)
    assert rest == 0, (deck.batch.global_size, micro, world.size)
    tokens = rank_tokens(deck, world.rank, count)
    return lambda: step(tokens)


def rank_tokens(deck: Deck, rank: int, count: int) -> Tensor:
    """The tokens of a rank's `count` micro-batches, [count, b, s + 1]."""
    vocabulary = deck.model.vocabulary
    assert vocabulary is not None
    shape = (count, deck.batch.micro_size, deck.batch.sequence + 1)
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(deck.run.seed + rank))


def _fsdp2(deck: Deck, world: World, model: TorchModel) -> Callable[[Tensor], Tensor]:
    """FSDP2 as torch's tutorial has it: every block, and what is around them, on its own."""
    if deck.precision.compute == "fp16":
        raise HpctrainError("--against fsdp2: has no loss scale; give it fp32 or bf16")
    mesh = init_device_mesh("cpu", (world.size,))
    policy = MixedPrecisionPolicy(param_dtype=Precision.of(deck).storage, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert isinstance(model, FSDPModule) and isinstance(model, nn.Module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    once = deck.memory.accumulate == "whole"

    def step(tokens: Tensor) -> Tensor:
        total = torch.zeros(())
        for index, batch in enumerate(tokens):
            model.set_requires_gradient_sync(not once or index == len(tokens) - 1)
            loss = loss_of(model(batch[:, :-1]), batch[:, 1:]) / len(tokens)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def _deepspeed(deck: Deck, world: World, model: TorchModel) -> Callable[[Tensor], Tensor]:
    """DeepSpeed's ZeRO as the deck's `layout.zero`, 3 where the deck has none, with its defaults.

    These sum the gradients of a 16-bit format in that format, which halves what travels.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(world.rank))
    try:
        deepspeed: Any = importlib.import_module("deepspeed")
    except ImportError as error:
        raise HpctrainError(
            f"--against deepspeed: DeepSpeed cannot be loaded ({error}); `pip install deepspeed` would help"
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    with contextlib.redirect_stdout(io.StringIO()):  # it tells of the operations that it builds
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    compute, micro = deck.precision.compute, deck.batch.micro_size
    settings = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": deck.batch.global_size // (micro * world.size),
        "zero_optimization": {"stage": deck.layout.zero or 3},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": compute == "bf16"},
        "fp16": {"enabled": compute == "fp16"},
        "steps_per_print": 2**31,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def step(tokens: Tensor) -> Tensor:
        total = torch.zeros(())
        for batch in tokens:
            loss = loss_of(engine(batch[:, :-1]), batch[:, 1:])
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        return total / len(tokens)

    return step


SHARDED_RIVALS = MappingProxyType({"fsdp2": _fsdp2, "deepspeed": _deepspeed})
