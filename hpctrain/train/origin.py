"""Whether the tokens of a run are what its weights know: their tokenizer, and the file they went on from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.exchange.source import source_tokenizer
from hpctrain.checkpoint.read import read_state
from hpctrain.comm.world import World
from hpctrain.data.tokenizer_difference import tokenizer_difference
from hpctrain.data.tokens import TokenFile
from hpctrain.deck.schema import Deck
from hpctrain.errors import HpctrainError
from hpctrain.units import format_count

CORPUS = "corpus"  # the key under which a checkpoint's state tells the token file that was trained on


def known_tokens(world: World, file: TokenFile) -> dict[str, Any]:
    """What checkpoints keep of a token file: its tokenizer, and what to know it by. Collective."""
    with world.agreement():
        corpus = _describe(file)
    return {"tokenizer": file.tokenizer_text, CORPUS: corpus}


def compare_tokens(world: World, deck: Deck, file: TokenFile, checkpoint: Path | None) -> list[str]:
    """Compare the token file with what the weights come from: `checkpoint`, or else model.from. Collective.

    Returns lines of what the user should know, on rank 0. HpctrainError on all ranks where the tokenizer is
    another one and data.other_tokenizer does not allow it.
    """
    lines: list[str] = []
    with world.agreement():
        if world.rank == 0 and checkpoint is not None:
            state = read_state(checkpoint)
            text = state.get("tokenizer")
            lines += _compare_tokenizers(deck, file, f"{checkpoint}", text, "it has none")
            lines += _compare_corpora(deck, file, checkpoint, state)
        elif world.rank == 0 and deck.model.source is not None:
            text, missing = source_tokenizer(Path(deck.model.source))
            lines += _compare_tokenizers(deck, file, f"model.from = {deck.model.source}", text, missing)
    return lines


def same_corpus(state: Mapping[str, Any], file: TokenFile) -> bool:
    """Whether a checkpoint's state was trained on this file; one that does not tell may have been."""
    return state.get(CORPUS) in (None, _describe(file))


def _compare_tokenizers(deck: Deck, file: TokenFile, source: str, text: object, missing: str) -> list[str]:
    unknown = f"whether {deck.data.tokens} has the tokenizer of {source} is not known"
    if not isinstance(text, str):
        return [f"{unknown}: {missing}"]
    try:
        difference = tokenizer_difference(file.tokenizer_text, text, file.where, source)
    except HpctrainError as error:
        return [f"{unknown}: {error.problems[0]}"]
    if difference and not deck.data.other_tokenizer:
        raise HpctrainError(
            deck.problem(
                "data.tokens",
                f"its tokenizer is not that of {source}: {difference} (`hpctrain prepare --tokenizer` makes "
                "tokens that the weights know; data.other_tokenizer = true allows others)",
            )
        )
    sentence = f"the tokenizer of {deck.data.tokens} is not that of {source}: {difference}"
    return [sentence] if difference else []


def _compare_corpora(deck: Deck, file: TokenFile, checkpoint: Path, state: Mapping[str, Any]) -> list[str]:
    if same_corpus(state, file):
        return []
    sizes = f"{format_count(file.tokens)} tokens, there {format_count(state[CORPUS]['tokens'])}"
    return [
        f"{deck.data.tokens} is not the token file that {checkpoint} was trained on ({sizes}): samples come "
        "in another order, some of them perhaps again"
    ]


def _describe(file: TokenFile) -> dict[str, int]:
    return {"tokens": file.tokens, "fingerprint": file.fingerprint}
