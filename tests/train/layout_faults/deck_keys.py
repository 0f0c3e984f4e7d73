"""Keys of decks in which faults of layouts show."""

from __future__ import annotations

TENSOR, SEQUENCE = ("layout.tensor=2",), ("layout.tensor=2", "layout.sequence_parallel=true")
CONTEXT, ULYSSES = ("layout.context=2",), ("layout.context=2", "layout.context_form=all_to_all")
PIPELINE, TIED = ("layout.pipeline=2",), ("layout.pipeline=2", "model.family=gpt2", "model.tied=true")
INTERLEAVED = (*PIPELINE, "layout.schedule=interleaved", "layout.chunks=2", "model.layers=4")
MIXTURE = ("model.experts.count=4", "model.experts.mlp=24", "model.experts.router_z_loss=0.01")
EXPERT, BIASED = (*MIXTURE, "layout.expert=2"), (*MIXTURE, "layout.expert=2", "model.experts.balance=bias")
BALANCED_OVER_STEP = (*MIXTURE, "model.experts.balance_over=step")
FP8 = ("precision.compute=fp8",)
DELAYED_SCALES, ONE_SCALE, ROW_SCALES = (
    (*FP8, f"precision.fp8={name}") for name in ("delayed", "tensor", "row")
)
MX_SCALES = (*FP8, "precision.fp8=mx")
FP8_MESSAGES = ("layout.tensor=2", "layout.sequence_parallel=true", "precision.fp8_messages=true")
FP8_GATHER = ("layout.zero=3", "precision.fp8_gather=true")
GPT2, DROPOUT = ("model.family=gpt2",), ("model.dropout=0.2",)
ADAM_MINI = ("optimizer.name=adam-mini",)
MUON = ("optimizer.name=muon", "layout.tensor=2")
DILOCO = ("layout.local_steps.replicas=2", "layout.local_steps.steps=3", "layout.local_steps.outer=diloco")
AVERAGE = ("layout.local_steps.replicas=2", "layout.local_steps.steps=3")
INT8, TOP_K, POWER_SGD = ((f"communication.compress={name}",) for name in ("int8", "topk", "powersgd"))
