"""Counter-based numbers: their distribution, and that they do not depend on how they are drawn."""

from __future__ import annotations

import numpy as np
import torch

from hpctrain.parallel.random import DropoutSource, dropout, key_of, normal


def test_normal_numbers_are_normal() -> None:
    drawn = normal(key_of(1, "a"), np.arange(400_000, dtype=np.uint64))
    assert abs(drawn.mean()) < 0.006
    assert abs(drawn.std() - 1) < 0.005
    assert abs((drawn**4).mean() - 3) < 0.06
    for point, share in ((-2.0, 0.02275), (-1.0, 0.15866), (0.5, 0.69146), (3.0, 0.99865)):
        assert abs((drawn < point).mean() - share) < 0.0025
    assert np.abs(drawn).max() < 4.4
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.006


def test_elements_do_not_depend_on_the_others_drawn_with_them() -> None:
    whole = normal(7, np.arange(1000, dtype=np.uint64))
    some = np.array([3, 999, 64, 65, 0], dtype=np.uint64)
    assert (normal(7, some) == whole[some]).all()


def test_keys_differ_by_seed_and_name() -> None:
    keys = {key_of(seed, name) for seed in range(50) for name in ("a", "b", "blocks.0.x", "blocks.1.x")}
    assert len(keys) == 200


def test_values_stay_what_they_are() -> None:
    assert normal(key_of(1234, "embedding.tokens.weight"), np.arange(3, dtype=np.uint64)).tolist() == GOLDEN


def source(samples: list[int], positions: list[int], step: int = 0) -> DropoutSource:
    return DropoutSource(5, step, torch.tensor(samples), torch.tensor(positions))


def test_masks_follow_samples_and_positions() -> None:
    whole = source([8, 9, 10], list(range(16)))
    mask = whole.mask(2, whole.positions, 32, 0.25)
    part = source([9, 10], [4, 5, 14])
    assert torch.equal(part.mask(2, part.positions, 32, 0.25), mask[[4, 5, 14]][:, 1:])
    assert not torch.equal(source([8, 9, 10], list(range(16)), 1).mask(2, whole.positions, 32, 0.25), mask)
    assert not torch.equal(whole.mask(3, whole.positions, 32, 0.25), mask)


def test_dropout_keeps_the_share_and_the_mean() -> None:
    drawn = source(list(range(64)), list(range(64)))
    x = torch.ones(64, 64, 64)
    dropped = dropout(x, drawn, 1, drawn.positions, 0.1)
    kept = dropped != 0
    assert abs(kept.float().mean() - 0.9) < 0.003
    assert torch.allclose(dropped[kept], torch.tensor(1 / 0.9))
    for dim in range(3):
        assert (kept.float().mean([d for d in range(3) if d != dim]) - 0.9).abs().max() < 0.025


GOLDEN = [0.6428264081994832, 0.3998021721750432, 0.15417330640567886]
