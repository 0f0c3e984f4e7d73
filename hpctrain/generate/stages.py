"""Stages of a pipeline as texts grow: each passes hidden states on, and the last one tells all what it drew.

Each rank has some layers of the model, and keys and values of these alone. All ranks of a copy know the same
texts, and so who takes part in which pass, without a word. As many groups of texts as there are stages take
turns: while the last stage computes for one of them, the first one has tokens of another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.comm.work import Work
from hpctrain.errors import HpctrainError
from hpctrain.generate.continuing import Draw, Drawn, GeneratedText, at_once
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.transformer import Transformer

HIDDEN, TOKENS = 0, 1
"""Tags of messages."""


class Stages:
    """The stages of which this rank's has this model's layers; all of them, where there is one."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.group = model, model.layer_context.pipeline
        assert model.span.has_embedding == (self.group.rank == 0), model.span
        assert model.span.has_head == (self.group.rank == self.group.size - 1), model.span
        self._sent: list[tuple[Work[None], Tensor]] = []

    @property
    def count(self) -> int:
        """How many there are, of which each has texts to compute for where so many groups take turns."""
        return self.group.size

    def through(self, inputs: ModelInputs) -> Tensor:
        """Hidden states [s, b, h] behind this stage's layers; on the last stage those that it predicts from.
        Collective over the stages, one after the other.
        """
        before: Tensor | None = None
        if not self.model.span.has_embedding:
            shape = *inputs.tokens.shape, self.model.shape.hidden
            before = self.group.recv(self.group.empty(shape, self.model.dtype), self.group.rank - 1, HIDDEN)
        hidden: Tensor = self.model(inputs, before)
        if not self.model.span.has_head:
            self._send(hidden, self.group.rank + 1, HIDDEN)
        return hidden

    def start_draw(self, draw: Draw, texts: Sequence[GeneratedText], logits: Tensor) -> Drawn:
        """See Passes: the last stage draws, from logits that only it has, and tells all others. An error
        there is that of all.
        """
        if self.count == 1:
            return at_once(draw, texts, logits)
        last, found, problem = self.count - 1, list[int](), None
        if self.group.rank == last:
            try:
                found = list(draw(texts, logits))
            except HpctrainError as error:
                problem = error
            told = torch.tensor([int(problem is not None), *(found or [0] * len(texts))])
            for stage in range(last):
                self._send(told, stage, TOKENS)
        sent, self._sent = self._sent, []

        def drawn() -> Sequence[int]:
            tokens, wrong = found, problem is not None
            if self.group.rank < last:
                told = self.group.recv(torch.empty(1 + len(texts), dtype=torch.int64), last, TOKENS)
                wrong, *tokens = told.tolist()
            for work, _ in sent:  # which by now has come, or does as soon as its receiver is here, too
                work.wait()
            if wrong:
                told_by_last = self.group.broadcast_object(problem.problems if problem else [], root=last)
                raise HpctrainError(told_by_last)
            return tokens

        return drawn

    def _send(self, tensor: Tensor, stage: int, tag: int) -> None:
        self._sent.append((self.group.start_send(tensor, stage, tag), tensor))
