"""How many sequences a deck's data has, which its reader asks for where run.epochs says how long a run is."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.data.data_checks import trained_count
from hpctrain.data.deck_tokens import open_entries
from hpctrain.deck.schema import Deck


class EpochReader:
    """What a deck's reader asks of files: how many sequences they have, nothing of what model.from names."""

    def __call__(self, path: str) -> Mapping[str, object]:  # noqa: ARG002
        """The keys that a model settles: none are looked for."""
        return {}

    @staticmethod
    def sequences(deck: Deck) -> int:
        """Those that one epoch trains on, of all entries of a mixture. Errors as of `open_entries`."""
        length, fraction = deck.batch.sequence, deck.data.validation
        return sum(trained_count(each, length, fraction, deck.data.pack) for each in open_entries(deck))
