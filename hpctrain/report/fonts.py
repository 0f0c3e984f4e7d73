"""Fonts of pictures. Characters that the first font lacks come from others; unknown ones are squares."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from hpctrain.errors import require
from hpctrain.report.palette import ON_LIGHT

_MISSING = "\N{WHITE SQUARE}"
_FIRST = "DejaVu Sans"  # comes with matplotlib
_OTHERS = (
    *(f"Noto Sans CJK {region}" for region in ("JP", "SC", "TC", "KR")),
    *("Noto Sans", "Noto Sans JP", "Noto Sans SC", "Source Han Sans"),
    *("WenQuanYi Zen Hei", "WenQuanYi Micro Hei"),
    *("Droid Sans Fallback", "IPAGothic", "TakaoGothic", "NanumGothic", "FreeSans", "FreeSerif", "Unifont"),
    *("Noto Emoji", "Symbola"),
)


@contextmanager
def drawing() -> Iterator[None]:
    """Return a context manager in which figures have hpctrain's fonts and colours.

    Raises:
        HpctrainError: matplotlib is not installed.
    """
    require("matplotlib", "drawing pictures")
    import matplotlib as mpl
    from cycler import cycler

    colours = cycler(color=ON_LIGHT)
    with mpl.rc_context({"font.family": _families(), "axes.prop_cycle": colours}):
        yield


def drawable(text: str) -> str:
    """Return a text that matplotlib draws literally, not as a formula or a hidden label.

    Characters that no font has, and control characters, become squares.
    """
    shown = "".join(map(_letter, text)).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


@cache
def _letter(letter: str) -> str:
    from matplotlib.font_manager import FontProperties, findfont, get_font

    kind = unicodedata.category(letter)
    if not kind.startswith("C") or kind == "Co":
        for family in _families():
            if get_font(findfont(FontProperties(family=family))).get_char_index(ord(letter)):
                return letter
    # Marks and joiners belong to a letter that has its square.
    return "" if kind in {"Mn", "Me", "Cf"} else _MISSING


@cache
def _families() -> list[str]:
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    return [_FIRST, *(name for name in _OTHERS if name in installed)]
