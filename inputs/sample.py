"""A trained model in a script: the likeliest next tokens, its loss on a text, and a text of its own.

python inputs/sample.py runs/quickstart "def "
"""

from __future__ import annotations

import sys

import torch

import hpctrain


def sample(run: str, prompt: str) -> None:
    """Print what the model makes of a prompt."""
    model = hpctrain.load(run)  # whole, on this rank, whatever layout trained it
    tokens = model.tokenizer.encode(prompt)[: model.window]
    logits = model.logits(tokens)  # [tokens, vocabulary]
    chances, likeliest = logits[-1].softmax(-1).topk(3)
    for chance, token in zip(chances.tolist(), likeliest.tolist(), strict=True):
        print(f"{model.tokenizer.decode([token])!r} comes next with probability {chance:.3f}")
    if len(tokens) > 1:
        expected = torch.tensor(tokens[1:], device=logits.device)
        loss = torch.nn.functional.cross_entropy(logits[:-1], expected)
        print(f"loss of the prompt: {loss:.4f} nats a token")
    print(model.generate(prompt, tokens=40, temperature=0.8, top_p=0.95, seed=1))


if __name__ == "__main__":
    try:
        sample(*(sys.argv[1:3] if len(sys.argv) > 2 else ("runs/quickstart", "def ")))
    except hpctrain.HpctrainError as error:
        sys.exit(f"{error}")
