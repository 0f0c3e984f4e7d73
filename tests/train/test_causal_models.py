"""Models of `transformers` that hpctrain does not have itself: `[model] from` of their folders, and back.

Also tests/causal_models.py, whose results are in causal_models.toml and in the guide,
hpctrain/model/modules/causal_model.py, hpctrain/checkpoint/exchange/module_exchange.py,
hpctrain/checkpoint/exchange/module_tensors.py and hpctrain/checkpoint/exchange/module_source.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError
from tests.causal_models import CHECKS, results, save_model

pytest.importorskip("transformers")

CASES = [(kind, column) for kind, works in results().items() for column in works]


@pytest.mark.sampled(4)
@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(("kind", "column"), CASES)
def test_what_the_guide_says(world: World, mpi_tmp_path: Path, kind: str, column: str) -> None:
    folder = mpi_tmp_path / kind
    save_model(kind, folder, world)
    if results()[kind][column] == "yes":
        CHECKS[column](world, folder)
    else:
        with pytest.raises(HpctrainError):
            CHECKS[column](world, folder)
