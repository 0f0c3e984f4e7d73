"""What memory the keys and values of texts take that grow."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.model.transformer import Transformer
from hpctrain.parallel.library import PAGE
from hpctrain.parallel.paged import PageLayout


@dataclass(frozen=True)
class CachePlan:
    """A cache of so many `places` for texts, each of which has at most `tokens`, on a rank's `blocks`.

    All that of the model's `window` have to be turned share their tables, of so many bytes a position.
    """

    places: int
    tokens: int
    blocks: int
    form: PageLayout
    window: int

    @staticmethod
    def of(model: Transformer, places: int, tokens: int) -> CachePlan:
        """For texts of so many tokens, as far as the model sees them."""
        shape, groups = model.shape, model.groups
        heads = max(1, shape.key_value_heads // groups.tensor.size)
        compiled, turned = groups.functions.compiled, shape.family == "llama"
        form = PageLayout(heads, shape.head_size, model.dtype, turned, compiled)
        return CachePlan(places, min(tokens, shape.sequence), model.span.blocks, form, shape.sequence)

    @property
    def pages_of_text(self) -> int:
        """That a text takes at the most."""
        return -(-self.tokens // PAGE)

    @property
    def pages(self) -> int:
        """Of all texts."""
        return self.places * self.pages_of_text

    @property
    def bytes(self) -> int:
        """2 x blocks x tokens x heads x features in all, in their formats, with the table of pages, and those
        by which keys are turned.
        """
        turning = 2 * self.window * self.form.head * self.form.dtype.itemsize if self.form.turned else 0
        return self.pages * (self.blocks * self.form.bytes + 8) + turning
