"""What of a user's words may stand in a batch script, where lines and words mean something.

Shells are given every text as one quoted word; schedulers' directives have no quoting that all of them share,
so that what stands in one must be a word by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hpctrain.job.job_options import JobOptions
from hpctrain.text import control_problem

_WORD = re.compile(r"\w[\w.,:@+/-]*")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_NAMES = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]*")


def word_problems(wish: JobOptions, path: Path, overrides: Sequence[str]) -> list[str]:
    """What in a wish, the deck's path and its `--set` arguments a script cannot carry, one sentence each."""
    given: dict[str, Iterable[str | None]] = {
        "the deck": [str(path)],
        "--set": overrides,
        "--variant": map(" ".join, wish.variants),
        "--account": [wish.account],
        "--partition": [wish.partition],
        "--mpi": [wish.mpi],
        "--image": [wish.image],
        "--volume": map(":".join, [wish.volume] if wish.volume else []),
        "--directive": wish.directives,
        "--module": wish.modules,
    }
    problems = [
        f"{name} {text}: {problem}"
        for name, texts in given.items()
        for text in texts
        if (problem := control_problem(text or ""))
    ]
    return problems or [*_directive_problems(wish), *_kubernetes_problems(wish)]


def _directive_problems(wish: JobOptions) -> Iterator[str]:
    if wish.scheduler != "kubernetes":
        options = (("--account", wish.account), ("--partition", wish.partition), ("--mpi", wish.mpi))
        for name, text in options:
            if text is not None and not _WORD.fullmatch(text):
                yield (
                    f"{name} {text}: must be one word of letters, digits and . , : @ + / - _ that starts "
                    "with a letter, a digit or _; use --directive for other options"
                )
    for text in wish.directives:
        if not re.match(r"--?\w", text):
            yield f'--directive {text}: must be an option of {wish.scheduler}, such as "--qos=high"'
    for text in wish.modules:
        if not text.strip() or text.startswith("-"):
            yield f"--module {text}: must be the name of a module, such as openmpi/5"


def _kubernetes_problems(wish: JobOptions) -> Iterator[str]:
    if wish.scheduler != "kubernetes":
        given = {"--image": wish.image, "--volume": wish.volume, "--shared-memory": wish.shared_memory}
        for name, value in given.items():
            if value is not None:
                yield f"{name} requires --scheduler kubernetes, not {wish.scheduler}"
        return
    if wish.directives:
        yield "--directive is unsupported with --scheduler kubernetes; edit the file instead"
    if wish.modules:
        yield "--module is unsupported with --scheduler kubernetes; use an image with --image"
    for name, text in (("--account", wish.account), ("--partition", wish.partition)):
        if text is not None and not _LABEL.fullmatch(text):
            yield (
                f"{name} {text}: must be a Kubernetes name: at most 63 lowercase letters, digits and "
                "hyphens, with a letter or digit at both ends"
            )
    if wish.image is not None and not _IMAGE.fullmatch(wish.image):
        yield f"--image {wish.image}: must be an image's name, such as registry.example.org/hpctrain:1"
    if wish.volume is not None:
        claim, mount = wish.volume
        if not _NAMES.fullmatch(claim):
            yield f"--volume {claim}: must start with a claim's name: lowercase letters, digits, - and ."
        if not mount.startswith("/") or ":" in mount:
            yield f"--volume {claim}:{mount}: must be mounted at a path that begins with /, without colons"
