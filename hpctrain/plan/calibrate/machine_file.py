"""File with the rates of a machine, which `read_machine` reads, with comments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from hpctrain.plan.time.machine_rates import MachineRates
from hpctrain.text import escaped

_UNITS = {
    "ranks_per_node": "ranks per node in the measurement",
    "memory": "bytes per rank",
    "memory_bandwidth": "bytes/s that a rank reads and writes in memory",
    "prepared_product": "bytes that oneDNN keeps for each prepared matrix product",
    "launch": "minimum seconds per operation",
    "fixed": "fixed seconds per step",
    "optimizer": "elements/s per rank",
    "logits": "logits that the output layer computes at a time",
    "overlap": "share of gradient reductions that overlaps with the backward pass",
    "layer_overlap": "share of tensor-parallel reductions that overlaps with matrix products",
    "waits": "wait for the slowest rank, as a share of the time between two tensor-parallel reductions",
}
_TABLES = {
    "products": "FLOP/s of an m x n x k product: peak x efficiency / (1 + saturation (1/m + 1/n + 1/k))",
    "attention": "FLOP/s of attention, counted without the causal mask",
    "elementwise": "seconds per element, forward and backward",
    "inside": "links inside nodes: bytes/s per rank in each direction, latency in seconds",
    "between": "links between nodes, likewise",
    "collectives": "collectives inside nodes: seconds for each size of the global tensor in bytes",
    "crossing": "collectives between nodes, likewise, with `together` ranks on each node",
    "formats": "rates that differ by format",
    "spread": "10th and 90th percentile of the measurements, as multiples of their median",
}


def machine_text(machine: MachineRates, notes: Mapping[str, str] | None = None) -> str:
    """Return the rates as TOML.

    Args:
        machine: The rates.
        notes: Names and texts of comments at the beginning.
    """
    lines = [f"# {name}: {escaped(text)}" for name, text in (notes or {}).items()]
    lines += [*([""] if lines else []), "[machine]"]
    tables = []
    for name, value in machine.model_dump(exclude_defaults=True).items():
        if isinstance(value, Mapping):
            tables.append((name, value))
        elif name == "crossing":
            continue
        else:
            unit = f"  # {_UNITS[name]}" if name in _UNITS else ""
            lines.append(f"{name} = {_value(value)}{unit}")
    for name, value in tables:
        lines += ["", f"# {_TABLES[name]}"] if name in _TABLES else [""]
        lines += list(_table(f"machine.{name}", value))
    return "\n".join(lines) + "\n"


def _table(name: str, values: Mapping[str, object]) -> Iterator[str]:
    """Yield the lines of a table and of its tables."""
    plain = {key: value for key, value in values.items() if not _is_table(value)}
    if plain or not values:
        yield f"[{name}]"
        for key, value in plain.items():
            if value is not None:
                yield f"{key} = {_value(value)}"
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _table(f"{name}.{key}", value)
        elif _is_table(value):
            assert isinstance(value, tuple | list)
            for each in value:
                yield f"[[{name}.{key}]]"
                yield from (f"{inner} = {_value(one)}" for inner, one in each.items() if one is not None)


def _is_table(value: object) -> bool:
    of_tables = isinstance(value, tuple | list) and bool(value) and isinstance(value[0], Mapping)
    return isinstance(value, Mapping) or of_tables


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value)


def rounded(machine: MachineRates, digits: int = 4) -> MachineRates:
    """Return the rates rounded to a number of significant digits."""

    def each(value: object) -> object:
        if isinstance(value, float):
            return float(f"{value:.{digits}g}")
        if isinstance(value, Mapping):
            return {name: each(one) for name, one in value.items()}
        return tuple(map(each, value)) if isinstance(value, tuple | list) else value

    return MachineRates.model_validate(each(machine.model_dump(exclude_defaults=True)))
