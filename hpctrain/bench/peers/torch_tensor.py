"""Peers that train the model with tensor parallelism of torch with gloo.

The parallel plan is that of the tensor-parallel tutorial of torch for Llama, with and without sequence
parallelism. The embedding is split by rows, and the head by columns.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from hpctrain.bench.peers.torch_model import TorchModel
from hpctrain.bench.peers.torch_training import PeerRank, PeerStep, TorchTraining, TorchUpdate
from hpctrain.data.batches import MicroBatch
from hpctrain.deck.activations import ACTIVATIONS
from hpctrain.deck.schema import Deck


def peer(name: str, deck: Deck, peer_rank: PeerRank, split: Sequence[int]) -> PeerStep:  # noqa: ARG001
    """Return a function that trains one step; "torch-sequence" adds sequence parallelism."""
    training = TorchTraining(deck)
    model = training.initialize(TorchModel(training.shape))
    parallelize(model, name == "torch-sequence", init_device_mesh("cpu", (peer_rank.size,)))
    if training.shape.tied and model.head is not None and model.embedding is not None:
        model.head.weight = model.embedding.weight
    update = TorchUpdate(training, [model], keep_masters=True)

    def backward(micro: MicroBatch, _: bool) -> Tensor:
        loss = training.loss_share(model, micro)
        loss.backward()
        return loss

    return training.step(backward, update)


def parallelize(model: TorchModel, sequence_parallel: bool, mesh: DeviceMesh) -> None:
    """Split the layers of a model over the ranks of a mesh.

    Args:
        model: Model to split, in peer_rank.
        sequence_parallel: True if each rank holds a part of the sequence between the split layers.
        mesh: Ranks of the tensor axis.
    """
    between = Shard(1) if sequence_parallel else Replicate()
    outer = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    if sequence_parallel:
        outer["final_norm"] = SequenceParallel()
    if model.positions is not None and sequence_parallel:
        # Learned positions are added to the split sequence, as a split sequence themselves.
        outer["positions"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
    parallelize_module(model, mesh, outer)
    inner = {
        "attention": PrepareModuleInput(
            input_layouts=(between, None), desired_input_layouts=(Replicate(), None)
        ),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(output_layouts=between),
        "feed_forward": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        "feed_forward.gate": ColwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=between),
    }
    if sequence_parallel:
        inner |= {"attention_norm": SequenceParallel(), "feed_forward_norm": SequenceParallel()}
    if not ACTIVATIONS[model.shape.activation].gated:
        del inner["feed_forward.gate"]
    for block in model.blocks:
        parallelize_module(block, mesh, inner)
