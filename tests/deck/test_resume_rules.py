"""Tests that the table of resume rules agrees with the schema and the reference."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.deck.key_messages import row_section
from hpctrain.deck.reference import reference_text
from hpctrain.deck.resume_rules import RESUME_RULES, keys_of_policy
from hpctrain.deck.schema import fields, sections, tables


def schema_keys() -> Iterator[str]:
    for table in tables():
        for name, field in fields(table).items():
            yield f"{table}.{name}"
            if (row := row_section(field)) is not None:
                yield from (f"{table}.{name}.{each}" for each in row.model_fields)


def test_table_has_exactly_the_keys_of_the_schema() -> None:
    assert sorted(RESUME_RULES) == sorted(schema_keys())


def test_each_key_has_one_rule() -> None:
    """A key in two lines of the table would silently get the rule of the last one."""
    from pathlib import Path

    import hpctrain.deck.resume_rules

    source = Path(hpctrain.deck.resume_rules.__file__).read_text()
    lines = [line for line in source.splitlines() if line.strip().startswith("**_rules(")]
    names = [line.split('"')[3] + "." + name for line in lines for name in line.split('"')[5].split()]
    assert len(names) == len(set(names)) == len(RESUME_RULES)


def test_reference_contains_the_rule_of_each_key() -> None:
    for section in sections():
        lines = reference_text(section).splitlines()
        text = " ".join(" ".join(lines).split())
        for name in fields(section):
            assert RESUME_RULES[f"{section}.{name}"].sentence in text, name
        assert text.count("Resume: ") == sum(key.startswith(f"{section}.") for key in RESUME_RULES)


def test_keys_with_a_fresh_optimizer() -> None:
    assert keys_of_policy("fresh optimizer") == (
        "optimizer.name",
        "optimizer.sgd.momentum",
        "optimizer.adafactor.beta1",
        "optimizer.muon.matrices",
        "optimizer.muon.momentum",
        "communication.compress",
    )
