"""The section `[report]`: dashboards that receive the metrics of a run besides `metrics.jsonl`."""

from __future__ import annotations

from typing import Literal

from hpctrain.deck.key import Section, key


class ReportSection(Section):
    """Further destinations of the rows of metrics.jsonl. None of them can slow or stop a run."""

    tensorboard: bool = key("Event files for TensorBoard, in the run's folder tensorboard.", False)
    wandb: Literal["off", "offline", "online"] = key(
        "Weights & Biases; offline: into the run's folder wandb, for `wandb sync`; online: sent at once.",
        "off",
    )
    trackio: bool = key("Trackio, on this machine, or where TRACKIO_SPACE_ID says.", False)
    csv: bool = key("metrics.csv in the run's folder, with a column for each figure.", False)

    @property
    def packages(self) -> dict[str, str]:
        """Python package that each enabled key needs, by the full name of the key."""
        enabled = {"tensorboard": self.tensorboard, "wandb": self.wandb != "off", "trackio": self.trackio}
        return {f"report.{name}": name for name, on in enabled.items() if on}
