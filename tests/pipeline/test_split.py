"""Assignment of layers to the parts of a pipeline."""

from __future__ import annotations

from hpctrain.pipeline.split import split_layers


def test_layers_are_split_into_parts() -> None:
    layers = ["embedding", *"abcde", "head"]
    assert split_layers(layers, [2, 1, 2]) == [["embedding", "a", "b"], ["c"], ["d", "e", "head"]]
    assert split_layers(layers, [5]) == [layers]
