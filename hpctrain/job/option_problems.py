"""Checks of the texts of a user that become part of a batch script.

In shell commands, every text is quoted as one word. Directives of schedulers have no common quoting, so a
text in a directive must be one word without special characters. No text may have control characters, which
could begin a new line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hpctrain.job.job_options import JobOptions
from hpctrain.text import control_problem

_WORD = re.compile(r"\w[\w.,:@+/-]*")
_KUBERNETES_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_CLAIM_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]*")


def option_problems(options: JobOptions, path: Path, overrides: Sequence[str]) -> list[str]:
    """Return the problems of texts that a batch script cannot contain, one sentence each.

    Args:
        options: Options of the job.
        path: Path of the deck.
        overrides: `--set` arguments of the deck.
    """
    texts_by_option: dict[str, Iterable[str | None]] = {
        "the deck": [str(path)],
        "--set": overrides,
        "--variant": map(" ".join, options.variants),
        "--account": [options.account],
        "--partition": [options.partition],
        "--mpi": [options.mpi],
        "--image": [options.image],
        "--volume": map(":".join, [options.volume] if options.volume else []),
        "--directive": options.directives,
        "--module": options.modules,
    }
    problems = [
        f"{name} {text}: {problem}"
        for name, texts in texts_by_option.items()
        for text in texts
        if (problem := control_problem(text or ""))
    ]
    return problems or [*_directive_problems(options), *_kubernetes_problems(options)]


def _directive_problems(options: JobOptions) -> Iterator[str]:
    if options.scheduler != "kubernetes":
        words = (("--account", options.account), ("--partition", options.partition), ("--mpi", options.mpi))
        for name, text in words:
            if text is not None and not _WORD.fullmatch(text):
                yield (
                    f"{name} {text}: must be one word of letters, digits and . , : @ + / - _ that starts "
                    "with a letter, a digit or _; use --directive for other options"
                )
    for text in options.directives:
        if not re.match(r"--?\w", text):
            yield f'--directive {text}: must be an option of {options.scheduler}, such as "--qos=high"'
    for text in options.modules:
        if not text.strip() or text.startswith("-"):
            yield f"--module {text}: must be the name of a module, such as openmpi/5"


def _kubernetes_problems(options: JobOptions) -> Iterator[str]:
    if options.scheduler != "kubernetes":
        kubernetes_options = {
            "--image": options.image,
            "--volume": options.volume,
            "--shared-memory": options.shared_memory,
        }
        for name, value in kubernetes_options.items():
            if value is not None:
                yield f"{name} requires --scheduler kubernetes, not {options.scheduler}"
        return
    if options.directives:
        yield "--directive is unsupported with --scheduler kubernetes; edit the file instead"
    if options.modules:
        yield "--module is unsupported with --scheduler kubernetes; use an image with --image"
    for name, text in (("--account", options.account), ("--partition", options.partition)):
        if text is not None and not _KUBERNETES_NAME.fullmatch(text):
            yield (
                f"{name} {text}: must be a Kubernetes name: at most 63 lowercase letters, digits and "
                "hyphens, with a letter or digit at both ends"
            )
    if options.image is not None and not _IMAGE.fullmatch(options.image):
        yield f"--image {options.image}: must be an image's name, such as registry.example.org/hpctrain:1"
    if options.volume is not None:
        claim, mount = options.volume
        if not _CLAIM_NAME.fullmatch(claim):
            yield f"--volume {claim}: must start with a claim's name: lowercase letters, digits, - and ."
        if not mount.startswith("/") or ":" in mount:
            yield f"--volume {claim}:{mount}: must be mounted at a path that begins with /, without colons"
