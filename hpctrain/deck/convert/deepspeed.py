"""Conversion of a DeepSpeed configuration, a JSON file, to deck keys.

Such a file describes neither the model nor the data, which the deck needs in addition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

from hpctrain.deck.convert.option_values import UnsupportedOptionError, choice, integer, number
from hpctrain.deck.convert.rule_table import Conversion, RuleTable, SourceOptions, apply_rules, load_table

_DEPTH = 8
_LARGEST_POWER = 24
_OPTIMIZERS = {
    "adam": "adamw",
    "adamw": "adamw",
    "fusedadam": "adamw",
    "sgd": "sgd",
    "lion": "lion",
    "muon": "muon",
}
_DECAYS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def deepspeed_table() -> RuleTable:
    """Return the rules for the settings of DeepSpeed, which are in `deepspeed.toml`."""
    return load_table("deepspeed.toml", "DeepSpeed", globals())


def convert_configuration(configuration: Mapping[str, object]) -> Conversion:
    """Convert the content of a DeepSpeed configuration to deck keys. Local.

    Settings that no deck key expresses raise no error. The Conversion lists them as unsupported with a
    reason, among them all settings whose value is "auto", and values that the deck key does not allow.

    Args:
        configuration: Content of the JSON file, with tables in tables. It is not changed.
    """
    table = deepspeed_table()
    settings = dict(_flatten(configuration, table.tables))
    automatic = sorted(name for name, value in settings.items() if value == "auto")
    defaults = table.applicable_defaults(settings)
    for name in automatic:
        settings.pop(name)
        defaults.pop(name, None)
    result = apply_rules(SourceOptions(settings, defaults), table)
    for name in automatic:
        result.report(
            name, "auto", "is set by the program that starts DeepSpeed (Trainer): set it in the deck"
        )
    return result


def _flatten(
    table: Mapping[str, object], unconverted: Set[str], prefix: str = "", depth: int = 0
) -> Iterator[tuple[str, object]]:
    """Yield all values with their dotted names. Tables that are switched off are left out.

    Tables in `unconverted`, whose settings are not converted, yield one value.
    """
    if depth and table.get("enabled") is False:
        return
    for name, value in table.items():
        if not depth and name in unconverted:
            if not isinstance(value, Mapping) or value.get("enabled") is not False:
                yield name, True
        elif isinstance(value, Mapping) and depth < _DEPTH:
            yield from _flatten(value, unconverted, f"{prefix}{name}.", depth + 1)
        elif value is not None:
            yield f"{prefix}{name}", value


def _accumulation(value: object, options: SourceOptions) -> None:
    """Check the number of micro-batches of a step, which follows from other keys in a deck."""
    micro, batch = (
        options.read("train_micro_batch_size_per_gpu", integer),
        options.read("train_batch_size", integer),
    )
    if micro and batch and integer(value) > 0 and batch % (micro * integer(value)):
        product = micro * integer(value)
        raise UnsupportedOptionError(
            f"must divide train_batch_size = {batch} together with the micro-batch, but their product "
            f"is {product}"
        )
    if "train_batch_size" not in options and integer(value) != 1:
        raise UnsupportedOptionError(
            "requires a change of batch.global_size: set it to this x the micro-batch x the number "
            "of data ranks"
        )


def _optimizer(value: object, options: SourceOptions) -> object:
    """Return the name of the optimizer, and a compression of gradients or None."""
    if str(value).lower() == "onebitadam":
        return "adamw", "onebit"
    name = choice(value, _OPTIMIZERS)
    if str(value).lower() == "adam" and options.get("optimizer.params.adam_w_mode") is False:
        raise UnsupportedOptionError(
            "with adam_w_mode = false is unsupported: a deck has decoupled weight decay"
        )
    return name, None


def _betas(value: object, _: SourceOptions) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise UnsupportedOptionError("must be two numbers")
    return number(value[0]), number(value[1])


def _optimizer_rate(value: object, options: SourceOptions) -> float:
    """Return the learning rate of the optimizer, unless the scheduler sets another one."""
    peak = options.read("scheduler.params.warmup_max_lr", number)
    if peak not in {None, number(value)}:
        raise UnsupportedOptionError(f"is overridden by scheduler.params.warmup_max_lr = {peak}")
    return number(value)


def _schedule(value: object, options: SourceOptions) -> object:
    """Return the decay, the steps of the warm-up or None, and the floor or None."""
    if value == "constant" and "scheduler.type" not in options:
        return "constant", 0, None
    decay = _DECAYS.get(str(value))
    if decay is None:
        raise UnsupportedOptionError(f"is not supported (supported: {', '.join(_DECAYS)})")
    return decay, None, 0.0 if decay == "linear" else None


def _initial_scale(value: object, _: SourceOptions) -> float:
    if integer(value) > _LARGEST_POWER:
        raise UnsupportedOptionError(
            f"must be at most {_LARGEST_POWER}: the largest initial loss scale of a deck is "
            f"2^{_LARGEST_POWER}"
        )
    return float(2 ** integer(value))


def _gradients(value: object, options: SourceOptions) -> object:
    compute = "bf16" if options.is_on("bf16.enabled") else "fp16"
    return choice(value, {"fp32": "fp32", compute: "compute"})


def _recomputed_blocks(value: object, _: SourceOptions) -> object:
    blocks = integer(value)
    return (blocks if blocks > 1 else "full") if blocks > 0 else None


def _context_ranks(value: object, _: SourceOptions) -> object:
    return (integer(value), "all_to_all") if integer(value) > 1 else None
