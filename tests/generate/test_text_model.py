"""What is drawn, what is shown, and the model that draws it, against plain references.

Tests of generate/text_model.py, generate/generate_command.py and generate/model_loading.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.checkpoint.save import save
from hpctrain.checkpoint.state_entries import training_entries
from hpctrain.comm.world import World
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.deck.toml_text import deck_text
from hpctrain.engine.build import build_engine
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.errors import HpctrainError
from hpctrain.generate.continuation import TextStream
from hpctrain.generate.generate_command import GenerateOptions, generate
from hpctrain.generate.model_loading import load_model
from hpctrain.generate.prompts import PromptOptions
from hpctrain.generate.sampling import Sampling
from hpctrain.model.part import blocks_of, logits_of
from hpctrain.model.transformer import Transformer
from tests.engines import LLAMA, small_deck

BYTES = Tokenizer("bytes")
END = BYTES.end_of_document
VOCABULARY = 320  # beyond the 257 of bytes
GREEDY = Sampling(tokens=40, temperature=0.0)


def make_checkpoint(
    world: World,
    path: Path,
    *overrides: str,
    change: Callable[[Transformer], None] = lambda _: None,
    **state: Any,
) -> Transformer:
    """Write the checkpoint of a model as it starts, changed, with all its training state; that model."""
    # A large spread of the weights, so that the model does not give one token again and again.
    deck = small_deck(f"model.vocabulary={VOCABULARY}", "model.initial_std=0.3", *overrides)
    mesh = make_mesh(deck, world)
    engine = build_engine(deck, world, mesh)
    change(engine.model)
    entries = training_entries(engine.state())
    save(path, world.everyone, entries, {"deck": deck_text(deck), "tokenizer": "bytes"} | state)
    return engine.model


def texts(world: World, target: Path, prompt: str, sampling: Sampling, live: bool = False) -> list[str]:
    """All that `generate` shows, as it shows it."""
    shown: list[str] = []
    generate(world, target, GenerateOptions(PromptOptions(prompt), sampling), shown.append, live)
    return shown


def reference(logits: Tensor, sampling: Sampling) -> list[float]:
    """Probabilities of one row by the definitions of top-k and of the nucleus (arXiv 1904.09751)."""
    chances = torch.tensor(logits.tolist(), dtype=torch.float64).div(sampling.temperature).exp().tolist()
    ranking = sorted(range(len(chances)), key=lambda token: (-chances[token], token))
    kept = ranking[: sampling.top_k] if sampling.top_k else ranking
    if sampling.top_p is not None:
        whole = sum(chances[token] for token in kept)
        size = next(
            n
            for n in range(1, len(kept) + 1)
            if n == len(kept) or sum(chances[token] for token in kept[:n]) >= sampling.top_p * whole
        )
        kept = kept[:size]
    whole = sum(chances[token] for token in kept)
    return [chances[token] / whole if token in kept else 0.0 for token in range(len(chances))]


@pytest.mark.parametrize("temperature", [0.3, 0.8, 2.0])
@pytest.mark.parametrize("top_k", [None, 1, 4, 100])
@pytest.mark.parametrize("top_p", [None, 1e-9, 0.3, 0.9, 1.0])
def test_probabilities_are_those_of_the_definitions(
    temperature: float, top_k: int | None, top_p: float | None
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    logits = torch.randn(5, 17, generator=torch.Generator().manual_seed(3)) * 2
    found = sampling.probabilities(logits)
    for row in range(5):
        assert found[row].tolist() == pytest.approx(reference(logits[row], sampling), abs=1e-12)
        assert [chance == 0 for chance in found[row].tolist()] == [
            chance == 0 for chance in reference(logits[row], sampling)
        ]


def test_ties_leave_no_more_than_k_tokens_and_the_first_is_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 7.0, 7.0, 7.0]])
    assert Sampling(top_k=2).probabilities(logits).tolist() == [[0.0, 0.5, 0.5, 0.0]]
    for sampling in (Sampling(top_k=1), Sampling(temperature=0.0), Sampling(temperature=1e-320)):
        found = sampling.probabilities(torch.tensor([[0.0, 5.0, 7.0, 6.0]]))
        assert found.tolist() == [[0.0, 0.0, 1.0, 0.0]]
    assert Sampling(top_k=1).probabilities(logits).tolist() == [[0.0, 1.0, 0.0, 0.0]]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "keys", [(), LLAMA, ("precision.compute=bf16", "machine.compile=true")], ids=["gpt2", "llama", "bf16"]
)
def test_greedy_is_the_argmax_of_the_logits(world: World, tmp_path: Path, keys: tuple[str, ...]) -> None:
    """In 16 bits logits are often alike: by torch's functions theirs depend on how many rows a pass has."""
    alone = world.single_rank_world()
    trained = make_checkpoint(alone, tmp_path / "a.h5", *keys)
    ids = BYTES.encode("def ")
    for _ in range(GREEDY.tokens):  # 44 tokens do not fit into the window of 32
        token = int(logits_of(trained, torch.tensor([ids[-32:]]))[0, -1, : BYTES.vocabulary].argmax())
        if token == END:
            break
        ids.append(token)
    assert len(set(ids)) > 8
    assert texts(alone, tmp_path / "a.h5", "def ", GREEDY) == [BYTES.decode(ids) + "\n"]
    drawn = Sampling(tokens=40, temperature=1.5, top_k=1, seed=3)
    assert texts(alone, tmp_path / "a.h5", "def ", drawn) == [BYTES.decode(ids) + "\n"]


def test_the_seed_fixes_the_text(world: World, tmp_path: Path) -> None:
    alone, path = world.single_rank_world(), tmp_path / "a.h5"
    make_checkpoint(alone, path)

    def text(seed: int | None, samples: int = 1) -> list[str]:
        return texts(alone, path, "x = ", Sampling(tokens=30, seed=seed, samples=samples))

    assert text(1) == text(1)
    assert text(1) != text(2)
    assert text(None) != text(None)
    [first, *others] = text(1, samples=10)
    assert first == "--- sample 1 of 10 ---\n" + text(1)[0]
    assert len({each.partition("\n")[2] for each in (first, *others)}) == 10


def test_what_is_shown_live_is_the_same_text(world: World, tmp_path: Path) -> None:
    alone, path = world.single_rank_world(), tmp_path / "a.h5"
    make_checkpoint(alone, path)
    sampling = Sampling(tokens=60, temperature=1.5, seed=1)
    pieces = texts(alone, path, "x = ", sampling, live=True)
    assert ["".join(pieces)] == texts(alone, path, "x = ", sampling)
    assert pieces[0] == "x = "
    assert len(pieces) > 10


def test_padding_of_the_vocabulary_is_never_drawn(world: World, tmp_path: Path) -> None:
    alone, path = world.single_rank_world(), tmp_path / "a.h5"

    def favour_padding(model: Transformer) -> None:
        model.layers[-1].head.table.data[BYTES.vocabulary :] *= 10

    trained = make_checkpoint(alone, path, change=favour_padding)
    logits = logits_of(trained, torch.tensor([BYTES.encode("x")]))[0, -1]
    assert int(logits.argmax()) >= BYTES.vocabulary
    likely = int(logits[: BYTES.vocabulary].argmax())
    assert texts(alone, path, "x", Sampling(1, 0.0)) == [BYTES.decode([*b"x", likely]) + "\n"]


def test_an_empty_prompt_begins_a_document(world: World, tmp_path: Path) -> None:
    alone, path = world.single_rank_world(), tmp_path / "a.h5"
    trained = make_checkpoint(alone, path)
    first = int(logits_of(trained, torch.tensor([[END]]))[0, -1, :257].argmax())
    assert texts(alone, path, "", Sampling(tokens=1, temperature=0.0)) == [BYTES.decode([first]) + "\n"]


def test_only_the_parameters_take_memory(world: World, tmp_path: Path) -> None:
    alone, path = world.single_rank_world(), tmp_path / "a.h5"
    trained = make_checkpoint(alone, path)
    model, _ = load_model(alone, path)
    for mine, other in zip(model.parameters(), trained.parameters(), strict=True):
        assert torch.equal(mine, other)
        assert getattr(mine, "gradient") is None  # noqa: B009
        assert mine.grad is None


@pytest.mark.parametrize("text", ["héllo €uro 😀 end", "😀"])
def test_a_stream_waits_for_whole_characters(text: str) -> None:
    stream = TextStream(BYTES)
    pieces = [stream.add([byte]) for byte in text.encode()]
    assert [piece for piece in pieces if piece] == list(text)
    assert stream.incomplete_text() == ""


def test_a_stream_gives_the_text_of_any_bytes() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        ids = torch.randint(0, 257, (40,), generator=generator).tolist()
        # Many starts of characters, so that some are cut by others.
        ids = [0xE2 if token > 200 else token for token in ids]
        stream = TextStream(BYTES)
        assert "".join(stream.add([token]) for token in ids) + stream.incomplete_text() == BYTES.decode(ids)


def test_a_stream_keeps_the_blanks_between_words() -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    words = {"▁one": 0, "▁two": 1, "▁three": 2, "</s>": 3, "▁": 4}
    library = Library(models.WordLevel(words, unk_token="▁"))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(library.to_str())
    stream = TextStream(tokenizer)
    assert [stream.add([token]) for token in (0, 1, 2)] == ["one", " two", " three"]


def test_every_wrong_option_is_told_at_once(world: World, tmp_path: Path) -> None:
    wrong = Sampling(0, float("nan"), 0, 1.5, -1, 0)
    with pytest.raises(HpctrainError) as caught:
        texts(world.single_rank_world(), tmp_path, "", wrong)
    assert [problem.split()[0] for problem in caught.value.problems] == [
        "--tokens", "--temperature", "--top-k", "--top-p", "--seed", "--samples",
    ]  # fmt: skip
    for top_p in (0.0, -0.1, float("nan")):
        with pytest.raises(HpctrainError, match=r"--top-p .*: must be above 0 and at most 1"):
            Sampling(top_p=top_p).check()
    Sampling(1, 0.0, 1, 1.0, 0, 1).check()


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"tokenizer": None}, "a.h5: contains no tokenizer"),
        ({"tokenizer": "{}"}, "a.h5: tokenizer: is not a `tokenizers` JSON"),
        ({"deck": None}, "a.h5: contains no deck"),
        ({"deck": "[model]\nlayerz = 3"}, "a.h5, its deck:2: "),
    ],
)
def test_a_checkpoint_that_will_not_do(
    world: World, tmp_path: Path, state: dict[str, Any], sentence: str
) -> None:
    make_checkpoint(world.single_rank_world(), tmp_path / "a.h5", **state)
    with pytest.raises(HpctrainError) as caught:
        texts(world.single_rank_world(), tmp_path / "a.h5", "", GREEDY)
    assert sentence in str(caught.value)


def test_logits_that_are_not_finite_are_a_sentence(world: World, tmp_path: Path) -> None:
    alone, path = world.single_rank_world(), tmp_path / "a.h5"

    def ruin(model: Transformer) -> None:
        for parameter in model.parameters():
            parameter.data.mul_(1e30)

    make_checkpoint(alone, path, change=ruin)
    with pytest.raises(HpctrainError, match="logits are not finite"):
        texts(alone, path, "a", GREEDY)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("family", [(), LLAMA], ids=["gpt2", "llama"])
def test_ranks_give_the_text_of_one(world: World, mpi_tmp_path: Path, family: tuple[str, ...]) -> None:
    """The checkpoint is written by data ranks, and read by tensor ranks whatever its layout."""
    path = mpi_tmp_path / "a.h5"
    make_checkpoint(world, path, *family)
    greedy = Sampling(tokens=12, temperature=0.0)
    shown = texts(world, path, "def ", greedy)
    expected = texts(world.single_rank_world(), path, "def ", greedy)
    assert shown == (expected if world.rank == 0 else [])
    model, _ = load_model(world, path)
    assert blocks_of(model)[0].feed_forward.down.weights[0].shape[1] * world.size in (48, 128)
    drawn = Sampling(tokens=6, samples=2)  # the seed is rank 0's own
    assert len(texts(world, path, "", drawn)) == (2 if world.rank == 0 else 0)


MIXTURE = (
    *LLAMA,
    "model.experts.count=6",
    "model.experts.mlp=16",
    "model.experts.shared=1",
    "model.experts.every=2",
)


@pytest.mark.mpi(min_size=1, max_size=4)
@pytest.mark.parametrize(
    "more",
    [(), ("model.experts.capacity=0.5",), ("model.experts.balance=bias", "model.experts.router=sigmoid")],
    ids=["all", "dropping", "bias"],
)
def test_mixtures_give_the_text_of_one_rank(world: World, mpi_tmp_path: Path, more: tuple[str, ...]) -> None:
    """Of short prompts, and of one longer than the window; experts lie on as many ranks as divide them."""
    path = mpi_tmp_path / "a.h5"
    bias = torch.tensor([1.0, -1.0, 0.5, 0.0, -0.5, 2.0])

    def change(model: Transformer) -> None:
        for block in blocks_of(model):
            router = getattr(block.feed_forward, "router", None)
            if router is not None and router.bias is not None:
                router.bias.copy_(bias)

    make_checkpoint(world, path, *MIXTURE, *more, change=change)
    greedy = Sampling(tokens=12, temperature=0.0)
    for prompt in ("", "d", "def f(x): return x + 1  # and a comment"):
        shown = texts(world, path, prompt, greedy)
        expected = texts(world.single_rank_world(), path, prompt, greedy)
        assert shown == (expected if world.rank == 0 else [])
    model, _ = load_model(world, path)
    mixture = blocks_of(model)[1].feed_forward
    if world.size in (1, 2):
        assert len(mixture.experts.gate_up) == 6 // world.size
    if mixture.router.bias is not None:
        assert torch.equal(mixture.router.bias.cpu(), bias)


@pytest.mark.mpi(min_size=2, max_size=4)
def test_copies_of_the_model_share_the_prompts(world: World, mpi_tmp_path: Path) -> None:
    """By themselves where there are as many texts as ranks, and as they are told: the texts are the same."""
    path, lines = mpi_tmp_path / "a.h5", mpi_tmp_path / "prompts.jsonl"
    make_checkpoint(world, path, *LLAMA)
    if world.rank == 0:
        lines.write_text("\n".join(f'{{"prompt": "{"ab" * (1 + n % 5)}", "n": {n}}}' for n in range(7)))
    world.everyone.barrier()
    source, sampling = PromptOptions(json_lines=str(lines)), Sampling(tokens=9, samples=2, seed=3)
    found = []
    for ranks, tensor in ((world, None), (world, 1), (world, world.size), (world.single_rank_world(), None)):
        shown: list[str] = []
        generate(ranks, path, GenerateOptions(source, sampling, tensor), shown.append, live=False)
        found.append(shown)
    assert found[:3] == ([found[3]] * 3 if world.rank == 0 else [[]] * 3)
    assert len(found[3]) == len(set(found[3])) == 14
    assert load_model(world, path, None, text_count=world.size)[0].layer_context.tensor.size == 1  # type: ignore[attr-defined]
    assert load_model(world, path, None, text_count=1)[0].layer_context.tensor.size == world.size  # type: ignore[attr-defined]
    with pytest.raises(HpctrainError, match=f"--tensor 5: must divide the {world.size} ranks"):
        generate(world, path, GenerateOptions(source, sampling, 5), found[0].append, live=False)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_cannot_split_the_model_are_told(world: World, mpi_tmp_path: Path) -> None:
    path = mpi_tmp_path / "a.h5"
    make_checkpoint(world, path, "model.heads=1")
    with pytest.raises(HpctrainError) as caught:
        texts(world, path, "", GREEDY)
    assert f"{world.size} ranks: the model of {path} is split over all of them, and their number " in str(
        caught.value
    )
    assert "must be at most model.heads = 1" in str(caught.value)


def test_several_texts_that_would_be_the_same_are_refused() -> None:
    with pytest.raises(
        HpctrainError, match="--samples 2 conflicts with --temperature 0, which gives the same text"
    ):
        Sampling(temperature=0.0, samples=2).check()
    with pytest.raises(
        HpctrainError, match="--samples 3 conflicts with --top-k 1, which gives the same text each time"
    ):
        Sampling(top_k=1, samples=3).check()
    Sampling(temperature=0.0).check()
    Sampling(top_k=2, samples=2).check()
