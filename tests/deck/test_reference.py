from __future__ import annotations

import pytest

from hpctrain.deck.key import field_text
from hpctrain.deck.presets import presets
from hpctrain.deck.reference import reference_text
from hpctrain.deck.schema import fields, sections, tables
from hpctrain.errors import HpctrainError


def test_every_key_stands_in_its_section_with_its_help() -> None:
    text = reference_text()
    flat = " ".join(text.split())
    for section in sections():
        part = text[text.index(f"\n[{section}]") :]
        part = part[: part.index("\n[", 1)] if "\n[" in part[1:] else part
        for name, field in fields(section).items():
            assert f"\n  {name} " in part, name
            assert field.description, name
            assert field.description.endswith("."), name
            assert ". " not in field.description, name
            assert len(field.description) <= 110, name
            assert " ".join(field.description.split()) in flat, name
            rows = [row for row in part.splitlines() if row.startswith(f"  {name} ")]
            assert rows[0].rstrip().endswith(field_text(field, "unit")), name
    assert all(f"\n  {name} " in text for name in presets())
    assert "mixtral-8x7b: 8 experts of mlp 14336, each token goes to 2." in flat


def test_a_hundred_columns_are_enough() -> None:
    assert max(map(len, reference_text().splitlines())) <= 100
    assert reference_text(width=200) == reference_text()


@pytest.mark.parametrize("width", [60, 80, 99])
def test_fewer_columns_do_as_well(width: int) -> None:
    text = reference_text(width=width)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    for section in sections():
        for name, field in fields(section).items():
            assert f"\n  {name}\n" in text
            assert " ".join((field.description or "").split()) in flat
    assert all(f"\n  {name}: family" in text for name in presets())


def test_some_rows() -> None:
    rows = [" ".join(row.split()) for row in reference_text().splitlines()]
    assert "micro_size whole number of at least 1 1 sequences" in rows
    assert 'compute "fp32", "bf16", "fp16" or "fp32"' in rows
    assert "bucket_bytes size above 0, such as 25000000 25000000 (25 MB) bytes" in rows
    assert "dropout number from 0 to below 1 0.0" in rows
    assert "data whole number of at least 1 all remaining ranks ranks" in rows
    assert "muon table the defaults of its keys" in rows


@pytest.mark.parametrize("section", sections())
def test_one_section(section: str) -> None:
    text = reference_text(section)
    assert text.startswith(f"[{section}]  ")
    assert text.rstrip("\n") in reference_text() or section == "model"
    assert [other for other in sections() if f"[{other}]  " in text] == [section]
    assert ("gpt2-124m" in text) == (section == "model")


@pytest.mark.parametrize("name", [name for name in tables() if "." in name])
def test_one_table_in_a_section(name: str) -> None:
    text = reference_text(name)
    assert text.startswith(f"[{name}]  ") and "   " not in text.splitlines()[1].strip()
    assert all(f"\n  {key} " in text for key in fields(name))
    assert [other for other in tables() if f"[{other}]  " in text] == [
        other for other in tables() if f"{other}.".startswith(f"{name}.")
    ]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("layouts", "unknown section (did you mean [layout]?)"),
        ("model.adapter", "unknown section (did you mean [model.adapters]?)"),
        ("layout.tensor", "is a key, not a section (its section is layout)"),
    ],
)
def test_no_such_section(name: str, reason: str) -> None:
    with pytest.raises(HpctrainError) as caught:
        reference_text(name)
    assert caught.value.problems == (f"--reference {name}: {reason}",)
