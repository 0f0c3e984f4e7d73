"""Number of elements of factors: the ratios that the paper publishes, and matrices that are sent in full."""

from __future__ import annotations

from math import prod

from hpctrain.sharding.compression.matrices import factor_rank
from tests.sharding.compression.given import message_elements


def resnet18() -> list[tuple[int, ...]]:
    """Return the shapes of ResNet-18 for CIFAR-10, as in the paper: 11,173,962 parameters."""
    shapes: list[tuple[int, ...]] = [(64, 27), (64,), (64,)]
    inputs = 64
    for outputs in (64, 128, 256, 512):
        for block in range(2):
            shapes += [
                (outputs, 9 * inputs),
                (outputs,),
                (outputs,),
                (outputs, 9 * outputs),
                (outputs,),
                (outputs,),
            ]
            if block == 0 and inputs != outputs:
                shapes += [(outputs, inputs), (outputs,), (outputs,)]
            inputs = outputs
    return [*shapes, (10, 512), (10,)]


def lstm() -> list[tuple[int, ...]]:
    """Return the shapes of three layers of 650 units with 28,869 tied word vectors: 28,949,319 parameters."""
    layer: list[tuple[int, ...]] = [(2600, 650), (2600, 650), (2600,), (2600,)]
    return [(28869, 650), *3 * layer, (28869,)]


def test_ratios_are_the_published_ones() -> None:
    """Tables 3, 10 and 11 of arXiv 1905.13727."""
    for shapes, parameters, published in (
        (resnet18(), 11_173_962, {1: 243.26, 2: 135.84, 4: 72.13}),
        (lstm(), 28_949_319, {1: 310, 2: 203, 4: 120}),
    ):
        elements = sum(prod(shape) for shape in shapes)
        assert elements == parameters
        for rank, ratio in published.items():
            digits = 2 if isinstance(ratio, float) else 0
            assert round(elements / sum(message_elements(shapes, rank)), digits) == ratio, rank


def test_matrices_are_sent_in_full_if_factors_are_not_smaller() -> None:
    assert factor_rank(100, 100, 4) == 4
    assert factor_rank(9, 100, 16) == 0  # 9 x 109 of 900
    assert factor_rank(8, 8, 4) == 0  # just as many
    assert factor_rank(9, 8, 4) == 4
    assert message_elements([(8, 8), (9, 8), (5,), (3, 100, 2)], 4) == (64 + 36 + 5 + 600, 32)
