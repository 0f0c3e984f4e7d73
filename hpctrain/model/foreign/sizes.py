"""What of a module's layers a plan can split, and the sizes of these."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Linear:
    """The sizes of a linear layer; the weight of one that is `transposed` is [inputs, outputs]."""

    inputs: int
    outputs: int
    transposed: bool

    @staticmethod
    def of(module: nn.Module) -> Linear | None:
        """Those of nn.Linear or transformers' Conv1D; of no other, nor of classes made of these."""
        if type(module) is nn.Linear:
            return Linear(module.in_features, module.out_features, False)
        kind = type(module)
        if kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers."):
            inputs, outputs = module.get_parameter("weight").shape
            return Linear(inputs, outputs, True)
        return None


def is_hooked(parameter: nn.Parameter) -> bool:
    """Whether a module has asked something to be done with its gradient, which is to come from autograd."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def lookup_problem(module: nn.Module) -> str:
    """Why a module is no embedding that can be split by rows; "" where it is one.

    A class made of nn.Embedding may do what it likes with what that gives.
    """
    if not isinstance(module, nn.Embedding):
        return f"it has the class {type(module).__name__} (nn.Embedding and nn.Linear are supported)"
    for name in ("max_norm", "sparse", "scale_grad_by_freq"):
        if getattr(module, name):
            return f"it has {name}"
    for kind in type(module).__mro__[: type(module).__mro__.index(nn.Embedding)]:
        code = getattr(vars(kind).get("forward"), "__code__", None)
        if "forward" in vars(kind) and (code is None or "super" not in code.co_names):
            return f"its class {kind.__name__} does not use the forward method of nn.Embedding"
    return ""


def part_sizes(outputs: int, parts: int | tuple[int, ...]) -> list[int] | None:
    """The sizes of what is packed into so many outputs; None where they do not add up to these."""
    if isinstance(parts, tuple):
        return list(parts) if sum(parts) == outputs else None
    return None if outputs % parts else [outputs // parts] * parts
