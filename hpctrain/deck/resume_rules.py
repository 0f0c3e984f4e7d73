"""Table of what happens to a resumed run if a key of its deck has changed.

A key has one of three policies. "free": the run continues with the new value. "fresh optimizer": the
checkpoint has no optimizer state for the new value, so the run continues only with `optimizer.restart =
true`, which initializes that state again. "refused": the new value changes the parameters or the function
that they compute, so it is an error. `engine/resume_check.py` compares two decks by this table.
`tests/deck/test_resume_rules.py` compares the table with the schema, so every new key must be added here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Policy = Literal["free", "fresh optimizer", "refused"]

PARAMETERS = "changes its parameters"
FUNCTION = "changes what its parameters compute"

_AT_THE_BEGINNING = "used only at the beginning of a run"
_OWN_RULES = "the rules of the keys in its table apply"
_NEW_ORDER = "the order of the samples changes"


@dataclass(frozen=True)
class ResumeRule:
    """Rule for a key whose value has changed when a run is resumed.

    Attributes:
        policy: The policy of the key.
        note: The reason of a refusal (`PARAMETERS`, `FUNCTION` or another clause), or a condition or
            consequence that the user should know; "" if there is none.
    """

    policy: Policy
    note: str = ""

    @property
    def sentence(self) -> str:
        """The rule as `hpctrain deck --reference` prints it."""
        return f"Resume: {self.policy}" + (f" ({self.note})." if self.note else ".")


def _rules(policy: Policy, section: str, names: str, note: str = "") -> dict[str, ResumeRule]:
    return {f"{section}.{name}": ResumeRule(policy, note) for name in names.split()}


RESUME_RULES: Mapping[str, ResumeRule] = {
    **_rules("free", "run", "title dir log_every evaluate_every evaluate_sequences patience threads device"),
    **_rules("free", "run", "noise_scale_steps time_limit time_margin trace trace_steps"),
    **_rules("free", "run", "steps tokens epochs", "defaults that depend on it, such as decay_steps, change"),
    **_rules("free", "run", "seed", _NEW_ORDER),
    **_rules("free", "model", "preset", "the keys that it sets are compared"),
    **_rules("refused", "model", "from", "a resumed run has weights of its own"),
    **_rules("refused", "model", "family layers hidden heads head_size key_value_heads mlp tied", PARAMETERS),
    **_rules("refused", "model", "query_key_norm vocabulary adapters", PARAMETERS),
    **_rules("refused", "model.adapters", "rank targets", PARAMETERS),
    **_rules("refused", "model.adapters", "alpha", FUNCTION),
    **_rules("free", "model", "frozen", "newly trained parameters get new optimizer state, with a message"),
    **_rules("free", "model", "experts", _OWN_RULES),
    **_rules("free", "model", "dropout"),
    **_rules("refused", "model.experts", "count mlp shared every dense_first", PARAMETERS),
    **_rules("refused", "model.experts", "per_token router router_normalize router_scale", FUNCTION),
    **_rules("refused", "model.experts", "router_groups router_groups_per_token capacity", FUNCTION),
    **_rules("free", "model.experts", "balance", 'from "bias", the router\'s bias is dropped with a message'),
    **_rules("free", "model.experts", "balance_loss balance_over balance_rate router_z_loss record_routing"),
    **_rules("free", "model.experts", "router_dtype", "results differ by rounding"),
    **_rules("refused", "model", "activation rope_base norm_epsilon", FUNCTION),
    **_rules("refused", "model", "parametrization base_width base_head_size", FUNCTION),
    **_rules("free", "model", "initial_std initial", _AT_THE_BEGINNING),
    **_rules("refused", "model", "module", f"{FUNCTION}; its file may move to another folder"),
    **_rules("refused", "model", "arguments", FUNCTION),
    **_rules("free", "model", "miniature blocks loss buffers plan"),
    **_rules("free", "data", "tokens mixture dataset arguments validation pack", _NEW_ORDER),
    **_rules("free", "data", "collate workers inputs other_tokenizer document_mask"),
    **_rules("refused", "objective", "kind", "if it needs another head or a further model; else free"),
    **_rules("refused", "objective", "beta", "if it was 0, since the run has no reference model; else free"),
    **_rules("free", "objective", "loss smoothing margin centering"),
    **_rules("free", "policy", "reward weights answer seconds processes tokens stops temperature samples"),
    **_rules("refused", "policy", "rollout epochs", "if a rollout of the new size has begun; else free"),
    **_rules("free", "policy", "clip_low clip_high kl mean scale whiten gamma gae_lambda"),
    **_rules("free", "policy", "value_clip reference critic_ranks reference_ranks reward_ranks shown"),
    **_rules("free", "policy", "critic", _OWN_RULES),
    **_rules("free", "evaluation", "sets"),
    **_rules("free", "evaluation.sets", "name tokens sequences"),
    **_rules("free", "layout", "auto data tensor context expert expert_tensor pipeline schedule chunks"),
    **_rules("free", "layout", "split"),
    **_rules("free", "layout", "zero zero_group sequence_parallel context_form chosen"),
    **_rules("free", "layout", "local_steps", _OWN_RULES),
    **_rules("free", "layout.local_steps", "replicas", "follows the number of ranks if it is not given"),
    **_rules("free", "layout.local_steps", "steps outer fragments delay blend format diloco"),
    **_rules("free", "layout.local_steps.diloco", "learning_rate momentum"),
    **_rules("free", "batch", "global_size micro_size ramp_from ramp_steps"),
    **_rules("refused", "batch", "sequence", 'with family "gpt2", whose learned positions it changes'),
    **_rules("fresh optimizer", "optimizer", "name"),
    **_rules("free", "optimizer", "weight_decay clip restart"),
    **_rules("free", "optimizer", "adamw sgd lion schedule-free muon adafactor adam-mini", _OWN_RULES),
    **_rules("free", "optimizer.adamw", "beta1 beta2 epsilon"),
    **_rules("free", "optimizer.adam-mini", "beta1 beta2 epsilon"),
    **_rules("free", "optimizer.schedule-free", "beta1 beta2 epsilon"),
    **_rules("free", "optimizer.lion", "beta1 beta2"),
    **_rules("fresh optimizer", "optimizer.sgd", "momentum", "if it was 0; else free"),
    **_rules("free", "optimizer.sgd", "nesterov"),
    **_rules("fresh optimizer", "optimizer.adafactor", "beta1", "if it was 0; else free"),
    **_rules("fresh optimizer", "optimizer.muon", "matrices"),
    **_rules("fresh optimizer", "optimizer.muon", "momentum", "if it was 0; else free"),
    **_rules("free", "optimizer.muon", "beta1 beta2 epsilon nesterov match newton_schulz"),
    **_rules("free", "optimizer.muon", "newton_schulz_steps others_rate"),
    **_rules("free", "learning_rate", "peak warmup decay decay_steps cooldown floor reference_batch"),
    **_rules("free", "precision", "compute gradients fp8 fp8_gradients", "results differ by rounding"),
    **_rules("free", "precision", "fp8_exclude", "results differ by rounding"),
    **_rules("free", "precision", "fp8_history fp8_watch fp8_messages fp8_gather loss_scale_window"),
    **_rules("free", "precision", "initial_loss_scale", _AT_THE_BEGINNING),
    **_rules("free", "memory", "recompute activations activation_format keep_gathered accumulate optimizer"),
    **_rules("free", "memory", "parameters offload_dir offload_buffer"),
    **_rules("free", "communication", "transport bucket_bytes check emulate ranks_per_node"),
    **_rules("fresh optimizer", "communication", "compress", "from topk with momentum of sgd; else free"),
    **_rules("free", "communication", "bf16 int8 sign onebit topk powersgd server"),
    **_rules("free", "communication.bf16", "between error_feedback"),
    **_rules("free", "communication.int8", "between error_feedback"),
    **_rules("free", "communication.sign", "between error_feedback"),
    **_rules("free", "communication.onebit", "between"),
    **_rules("free", "communication.topk", "between ratio"),
    **_rules("free", "communication.powersgd", "between rank error_feedback"),
    **_rules("free", "communication.server", "mode ranks staleness correction compensation"),
    **_rules("refused", "communication", "warmup", "if raised after replicas have diverged; else free"),
    **_rules("free", "checkpoint", "every keep keep_every keep_best memory_every mode buffer mirror"),
    **_rules("free", "checkpoint", "mirror_every"),
    **_rules("free", "stability", "hang_seconds check_parameters straggler_factor z_loss spike spike_window"),
    **_rules("free", "stability", "spike_factor spike_back spike_most corruption corruption_every"),
    **_rules("free", "stability", "verify_layout max_skipped_steps"),
    **_rules("free", "machine", "peak_flops rates bind products compile ranks_per_node gpus_per_node memory"),
    **_rules("free", "machine", "gpu_memory"),
    **_rules("free", "report", "tensorboard wandb trackio csv"),
}  # fmt: skip
"""The rule of every key, by its full name."""


def keys_of_policy(policy: Policy) -> tuple[str, ...]:
    """Return the full names of the keys with a policy, in the order of the table."""
    return tuple(key for key, rule in RESUME_RULES.items() if rule.policy == policy)
