"""A look at a run, as in a notebook: how its loss went, and what its checkpoint holds.

python inputs/look.py runs/quickstart
"""

from __future__ import annotations

import sys

import numpy as np

import hpctrain


def look(run: str) -> None:
    """Print the loss over the run, and the largest parameters of its newest checkpoint."""
    columns = hpctrain.metrics(run)  # arrays of numpy's, a value a step; nan where a step has none
    steps, losses = columns["step"], columns["loss"]
    print(f"{len(steps)} steps, {columns['tokens'][-1]} tokens, {columns['seconds'].sum():.1f} s")
    for part in np.array_split(np.arange(len(steps)), min(5, len(steps))):
        print(f"steps {steps[part[0]]}-{steps[part[-1]]}: mean loss {np.nanmean(losses[part]):.4f}")

    with hpctrain.open_checkpoint(run) as checkpoint:  # no tensor is read yet
        ranks, peak = checkpoint.history[-1].ranks, checkpoint.deck.learning_rate.peak
        print(f"{checkpoint!r}, written by a run on {ranks} ranks, peak {peak}")
        largest = sorted(checkpoint.model.values(), key=lambda tensor: -tensor.nbytes)[:3]
        for tensor in largest:
            first = tensor[:2].float()  # two rows are read, whatever ranks wrote them
            print(f"{tensor.name} {list(tensor.shape)}: two rows of spread {first.std():.4f}")
        whole = largest[0].numpy()  # all of it, compared with its checksums
        print(f"{largest[0].name} has norm {np.linalg.norm(whole):.3f}")


if __name__ == "__main__":
    try:
        look(sys.argv[1] if len(sys.argv) > 1 else "runs/quickstart")
    except hpctrain.HpctrainError as error:
        sys.exit(f"{error}")
