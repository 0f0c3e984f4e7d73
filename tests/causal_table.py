"""The page of the guide about models of `transformers` that are not built in, from `causal_models.toml`.

`python -m tests.causal_table` writes the page anew; tests/guide/test_causal_table.py compares it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from hpctrain.guide.pages import FOLDER
from tests.causal_models import REFUSED, TRIED_ONCE, results

PAGE = FOLDER / "reference" / "other-models.md"
COLUMNS: Mapping[str, str] = {
    "zero": "data ranks, ZeRO-3",
    "tensor": "tensor ranks",
    "pipeline": "pipeline stages",
    "generate": "generate",
    "export": "import, export",
}
HEAD = """# Models of transformers that are not built in

Which models can `[model] from` train besides [those that are built in](../tasks/hugging-face.md)?

A folder of any causal language model of the installed `transformers` can be trained.
The folder must not need code of its own.
The model then runs as [a module](../tasks/own-module.md). The start of a run says so.

Each row was tested with a small model of its type, on two ranks, with `transformers` {version}.
Losses and gradient norms of three steps equal those of a plain PyTorch loop.
The loop trains the model that `transformers` loads from the same folder.
Imported and exported weights have the same bits, and greedy text is the same.

Encoders such as BERT are trained as decoders if `config.json` has `"is_decoder": true`.
Without it, they are refused. With `transformers`, write the folder of a decoder:
`AutoModelForCausalLM.from_pretrained(DIR, is_decoder=True).save_pretrained(OUT)`.

Further types of this kind have passed the same tests once:
{tried_once}.

Models that hold a model of images, audio or video are refused. Most of them have
a language model that can be trained in
[a folder of its own](../tasks/hugging-face.md#models-of-images-and-text).

| `model_type` | {titles} |
|---|{lines}
"""
REASONS = """
## What does not work, and why

"-" means that an error names the reason. `transformers` has no tensor plan for models that have "-" for
tensor ranks above and no row below.
A [table of patterns](../tasks/own-module.md) in the deck can be a substitute for a plan.

| `model_type` | what | why |
|---|---|---|
"""
REFUSED_HEAD = """
## Types that are refused, and why

All other causal language models of `transformers` {version} are built in or listed above.

| `model_type` | why |
|---|---|
"""
TAIL = """
`hpctrain check` tells whether a layout computes the same model.
"""
VERSION = "5.23.0"
NO_PLAN = "no plan"
"""Reason of models without a plan in `transformers`, of which the page has one sentence for all."""


def rows() -> Iterator[str]:
    """Yield the rows of the table."""
    for kind, works in sorted(results().items()):
        cells = ("yes" if works.get(column) == "yes" else "-" for column in COLUMNS)
        yield f"| `{kind}` | {' | '.join(cells)} |"


def reasons() -> Iterator[str]:
    """Yield the rows of the table of reasons, without models that have no plan."""
    for kind, works in sorted(results().items()):
        found: dict[str, list[str]] = {}
        for column, title in COLUMNS.items():
            if (reason := works[column]) not in ("yes", NO_PLAN):
                found.setdefault(reason, []).append(title)
        for reason, titles in found.items():
            yield f"| `{kind}` | {'; '.join(titles)} | {reason} |"


def refused() -> Iterator[str]:
    """Yield the rows of the table of types that are refused: one for each reason."""
    for reason in dict.fromkeys(REFUSED.values()):
        kinds = ", ".join(f"`{kind}`" for kind, why in REFUSED.items() if why == reason)
        yield f"| {kinds} | {reason} |"


def page() -> str:
    """Return the text of the page."""
    titles, lines = " | ".join(COLUMNS.values()), "---|" * len(COLUMNS)
    once = "\n".join(
        textwrap.wrap(", ".join(f"`{kind}`" for kind in TRIED_ONCE), 100, break_on_hyphens=False)
    )
    head = HEAD.format(version=VERSION, titles=titles, lines=lines, tried_once=once)
    tables = [(head, rows()), (REASONS, reasons()), (REFUSED_HEAD.format(version=VERSION), refused())]
    return "".join(text + "\n".join(lines) + "\n" for text, lines in tables) + TAIL


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
