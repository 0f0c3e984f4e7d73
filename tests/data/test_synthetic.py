"""Random tokens: of every seed that a deck may have, another one for each sequence."""

from __future__ import annotations

import pytest
import torch

from hpctrain.data.synthetic import SyntheticSource


@pytest.mark.parametrize("seed", [0, 1, 1234, 2**63 - 1])
def test_every_seed_and_number_has_its_own_tokens(seed: int) -> None:
    source = SyntheticSource(16, 1 << 20, seed=seed, masked=0.5)
    rows = torch.stack([source.sequence(index)[0] for index in (0, 1, source.count - 1)])
    assert len(torch.unique(rows, dim=0)) == 3
    assert torch.equal(source.sequence(1)[0], rows[1])
