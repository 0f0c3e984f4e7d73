"""Generation with the layers of a model on several pipeline stages.

Each stage has some layers, with their keys and values, and sends hidden states to the next one. The last
stage samples the tokens and sends them to all others. All ranks of a replica know the same texts, and so
which of them take part in each pass. The texts are in as many groups as there are stages: while the last
stage computes for one group, the first one computes for another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.comm.work import Work
from hpctrain.errors import HpctrainError
from hpctrain.generate.continuous_batching import GeneratedText, PendingTokens, TokenSampler, sample_now
from hpctrain.model.inputs import ModelInputs
from hpctrain.model.transformer import Transformer

_HIDDEN_TAG, _TOKENS_TAG = 0, 1


class PipelineStages:
    """Messages between the stages of a model that generates text. Without messages if there is one stage.

    Args:
        model: Layers of this rank's stage.
    """

    def __init__(self, model: Transformer) -> None:
        self.model, self.group = model, model.layer_context.pipeline
        assert model.span.has_embedding == (self.group.rank == 0), model.span
        assert model.span.has_head == (self.group.rank == self.group.size - 1), model.span
        self._started_sends: list[tuple[Work[None], Tensor]] = []

    @property
    def count(self) -> int:
        """Number of stages."""
        return self.group.size

    def run_layers(self, inputs: ModelInputs) -> Tensor:
        """Receive hidden states, run the layers of this stage, and start to send the result.

        Collective over the stages, which run one after the other.

        Args:
            inputs: Tokens [b, s], which all stages know, with their positions and cache.

        Returns:
            Hidden states [s, b, h] after the layers of this stage.
        """
        received: Tensor | None = None
        if not self.model.span.has_embedding:
            shape = *inputs.tokens.shape, self.model.shape.hidden
            buffer = self.group.empty(shape, self.model.dtype)
            received = self.group.recv(buffer, self.group.rank - 1, _HIDDEN_TAG)
        hidden: Tensor = self.model(inputs, received)
        if not self.model.span.has_head:
            self._start_send(hidden, self.group.rank + 1, _HIDDEN_TAG)
        return hidden

    def start_sampling(
        self, sampler: TokenSampler, texts: Sequence[GeneratedText], logits: Tensor
    ) -> PendingTokens:
        """Sample tokens on the last stage, and start to send them to all other stages.

        Collective over the stages. An error of the sampler is raised on all stages, by the function that
        waits for the tokens.

        Args:
            sampler: Function that samples, which only the last stage calls.
            texts: The texts.
            logits: Their logits [texts, V] on the last stage.

        Returns:
            Function that waits for the tokens.
        """
        if self.count == 1:
            return sample_now(sampler, texts, logits)
        last, sampled, problem = self.count - 1, list[int](), None
        if self.group.rank == last:
            try:
                sampled = list(sampler(texts, logits))
            except HpctrainError as error:
                problem = error
            message = torch.tensor([int(problem is not None), *(sampled or [0] * len(texts))])
            for stage in range(last):
                self._start_send(message, stage, _TOKENS_TAG)
        sends, self._started_sends = self._started_sends, []

        def wait() -> Sequence[int]:
            tokens, has_failed = sampled, problem is not None
            if self.group.rank < last:
                buffer = torch.empty(1 + len(texts), dtype=torch.int64)
                has_failed, *tokens = self.group.recv(buffer, last, _TOKENS_TAG).tolist()
            for work, _ in sends:  # their receivers have all started, or are about to
                work.wait()
            if has_failed:
                raise HpctrainError(
                    self.group.broadcast_object(problem.problems if problem else [], root=last)
                )
            return tokens

        return wait

    def _start_send(self, tensor: Tensor, stage: int, tag: int) -> None:
        self._started_sends.append((self.group.start_send(tensor, stage, tag), tensor))
