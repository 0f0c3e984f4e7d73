"""The keys of `[report]`: to whose dashboards a run tells its metrics, besides `metrics.jsonl`."""

from __future__ import annotations

from typing import Literal

from hpctrain.deck.key import Section, key


class ReportSection(Section):
    """Where the rows of metrics.jsonl go as well; none of these ever slows or stops a run."""

    tensorboard: bool = key("Event files for TensorBoard, in the run's folder tensorboard.", False)
    wandb: Literal["off", "offline", "online"] = key(
        "Weights & Biases; offline: into the run's folder wandb, for `wandb sync`; online: sent at once.",
        "off",
    )
    trackio: bool = key("Trackio, on this machine, or where TRACKIO_SPACE_ID says.", False)
    csv: bool = key("metrics.csv in the run's folder, with a column for each figure.", False)

    @property
    def packages(self) -> dict[str, str]:
        """Of each key that needs a package, its name."""
        wanted = {"tensorboard": self.tensorboard, "wandb": self.wandb != "off", "trackio": self.trackio}
        return {f"report.{name}": name for name, on in wanted.items() if on}
