"""Learning rate, loss scale, noise scale and loss spikes of a run."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.deck.schema import Deck
from hpctrain.fault_checks.spikes import SpikeDetector
from hpctrain.model.precision import Precision
from hpctrain.optim.loss_scale import LossScale
from hpctrain.optim.noise_scale import NoiseScale
from hpctrain.optim.schedule import LearningRate


@dataclass
class UpdateControl:
    """Schedules and detectors that decide whether and how far each step updates the parameters.

    Attributes:
        learning_rate: Learning rate by step.
        loss_scale: Factor of losses in fp16.
        noise_scale: Estimate of the gradient noise scale.
        spikes: Detector of loss spikes.
    """

    learning_rate: LearningRate
    loss_scale: LossScale
    noise_scale: NoiseScale
    spikes: SpikeDetector

    @staticmethod
    def of(deck: Deck) -> UpdateControl:
        """Return the control of a deck's updates, as at the start of a run."""
        keys, scaled = deck.stability, Precision.of(deck).scales_loss
        return UpdateControl(
            LearningRate(**deck.learning_rate.model_dump()),
            LossScale(
                deck.precision.initial_loss_scale if scaled else 1.0,
                deck.precision.loss_scale_window if scaled else 0,
            ),
            NoiseScale(deck.run.noise_scale_steps),
            SpikeDetector(
                keys.spike,
                keys.spike_window,
                keys.spike_factor,
                keys.spike_most,
                deck.learning_rate.warmup,
                scaled,
            ),
        )
