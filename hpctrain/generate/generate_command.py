"""Work of `hpctrain generate`: load a checkpoint, continue prompts, and output the texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from hpctrain.comm.world import World
from hpctrain.generate.continuation import Continuation
from hpctrain.generate.model_loading import load_model, make_chat_tokenizer
from hpctrain.generate.prompts import Prompt, PromptOptions
from hpctrain.generate.sampling import Sampling
from hpctrain.generate.text_model import TextModel
from hpctrain.watch.checkpoint_target import find_checkpoint

_PROMPTS_PER_REPLICA = 64
"""Number of prompts of each replica whose texts are generated before they are output."""


@dataclass(frozen=True)
class GenerateOptions:
    """Options of `hpctrain generate`.

    Attributes:
        prompts: Source of the prompts.
        sampling: Sampling options.
        tensor: Tensor ranks of each replica of the model; None to choose by size, see `load_model`.
        pipeline: Pipeline stages of each replica.
        chat: True if each prompt is the message of a user, and only the answers are output.
    """

    prompts: PromptOptions
    sampling: Sampling
    tensor: int | None = None
    pipeline: int = 1
    chat: bool = False


def generate(
    world: World, target: Path, options: GenerateOptions, output: Callable[[str], None], live: bool
) -> None:
    """Continue prompts with the model of a checkpoint, and output the texts. Collective over all ranks.

    If the prompts are lines of JSON, so is the output. Otherwise it is each prompt with its continuation.

    Args:
        world: All ranks.
        target: A checkpoint, or a run folder with checkpoints.
        options: The options. Rank 0 reads the prompts.
        output: Function that outputs a piece of text, called on rank 0.
        live: True to output a single sample of a prompt while it is generated.

    Raises:
        HpctrainError: An option or the checkpoint is not valid, or a text cannot be output. Raised on all
            ranks.
        InputOutputError: A file cannot be read. Raised on all ranks.
    """
    world.ledger.activity = "reading the prompts"
    with world.agreement(), world.hang.allow_silence():  # stdin may take any time
        options.sampling.check()
        prompts = options.prompts.read() if world.rank == 0 else []
    prompts = world.everyone.broadcast_object(prompts)
    sampling = options.sampling.with_seed(world.everyone)
    path = find_checkpoint(world, target)
    has_several, is_json = sampling.samples > 1, options.prompts.json_lines is not None
    model = _load(world, path, options, len(prompts) * sampling.samples)

    def output_on_rank_0(text: str) -> None:
        with world.agreement(), world.hang.allow_silence():  # the reader of the text may take any time
            if world.rank == 0 and text:
                output(text)

    def format_sample(prompt: Prompt, number: int, sample: Continuation) -> str:
        if is_json:
            return format_json_line(prompt, sample, number if has_several else None)
        heading = f"--- sample {number} of {sampling.samples} ---\n" if has_several else ""
        return f"{heading}{sample.full_text}\n"

    output_length = 0

    def output_new_text(sample: Continuation) -> None:
        nonlocal output_length
        output_on_rank_0(sample.full_text[output_length:])
        output_length = len(sample.full_text)

    if live and not has_several and not is_json:
        for _ in model.generate_samples([prompt.text for prompt in prompts], sampling, output_new_text):
            output_on_rank_0("\n")
        return
    prompts_per_round = _PROMPTS_PER_REPLICA * model.replica_count
    for first in range(0, len(prompts), prompts_per_round):
        some_prompts = prompts[first : first + prompts_per_round]
        for text in model.format_samples(some_prompts, sampling, format_sample):
            output_on_rank_0(text)


def _load(world: World, path: Path, options: GenerateOptions, text_count: int) -> TextModel:
    """Load the model and its tokenizers. Collective over all ranks."""
    world.ledger.activity = "loading the model"
    part, tokenizer = load_model(world, path, options.tensor, text_count, options.pipeline)
    world.ledger.activity = "generating text"
    chat = None
    if options.chat:
        now = world.everyone.broadcast_object(datetime.now().isoformat(timespec="seconds"))
        with world.agreement():
            chat = make_chat_tokenizer(tokenizer, path, now)
    return TextModel(world, path, part, tokenizer, chat)


def format_json_line(prompt: Prompt, sample: Continuation, number: int | None) -> str:
    """Return the line of JSON about a sample.

    Args:
        prompt: The prompt, whose other keys come first.
        sample: The finished sample.
        number: Number of the sample; None if each prompt has one sample.
    """
    line = {
        "prompt": prompt.text,
        "text": sample.text,
        "tokens": sample.token_count,
        "ended": sample.finish_reason,
    }
    return json.dumps(prompt.other_keys | line | ({} if number is None else {"sample": number})) + "\n"
