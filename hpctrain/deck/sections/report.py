"""The section `[report]`: dashboards that receive the metrics of a run besides `metrics.jsonl`."""

from __future__ import annotations

from typing import Literal

from hpctrain.deck.key import Section, key


class ReportSection(Section):
    """Further destinations of the rows of metrics.jsonl. None of them can slow or stop a run."""

    tensorboard: bool = key(
        "Whether to write TensorBoard event files, to the folder tensorboard of the run.", False
    )
    wandb: Literal["off", "offline", "online"] = key(
        "Weights & Biases; offline: the run's folder wandb, for `wandb sync`; online: sent during the run.",
        "off",
    )
    trackio: bool = key(
        "Whether to report to Trackio, on this machine or in the space that TRACKIO_SPACE_ID names.", False
    )
    csv: bool = key(
        "Whether to write metrics.csv, with a column for each metric, to the run's folder.", False
    )

    @property
    def packages(self) -> dict[str, str]:
        """Python package that each enabled key needs, by the full name of the key; empty if none needs one.

        An example is {"report.wandb": "wandb"}. The packages need not be installed.
        """
        enabled = {"tensorboard": self.tensorboard, "wandb": self.wandb != "off", "trackio": self.trackio}
        return {f"report.{name}": name for name, on in enabled.items() if on}
