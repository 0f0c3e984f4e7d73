"""Number of training sequences of a deck, which the reader of decks needs if `run.epochs` sets the length."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.data.data_checks import trained_count
from hpctrain.data.deck_tokens import open_entries
from hpctrain.deck.schema import Deck


class EpochReader:
    """Callback of the reader of decks that counts sequences and does not open `model.from`."""

    def __call__(self, path: str) -> Mapping[str, object]:  # noqa: ARG002
        """Return no defaults of keys for the model at `path`."""
        return {}

    @staticmethod
    def sequences(deck: Deck) -> int:
        """Return the number of training sequences of all entries, with the errors of `open_entries`."""
        length, fraction = deck.batch.sequence, deck.data.validation
        return sum(trained_count(each, length, fraction, deck.data.pack) for each in open_entries(deck))
