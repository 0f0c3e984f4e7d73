"""Tests that the table of resume rules agrees with the schema and the reference."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.deck.key_messages import row_section
from hpctrain.deck.reference import reference_text
from hpctrain.deck.resume_rules import keys_of_policy, resume_rules
from hpctrain.deck.schema import fields, sections, tables
from hpctrain.deck.toml import read_data_file


def schema_keys() -> Iterator[str]:
    for table in tables():
        for name, field in fields(table).items():
            yield f"{table}.{name}"
            if (row := row_section(field)) is not None:
                yield from (f"{table}.{name}.{each}" for each in row.model_fields)


def test_table_has_exactly_the_keys_of_the_schema() -> None:
    assert sorted(resume_rules()) == sorted(schema_keys())


def test_each_key_has_one_rule() -> None:
    """A key in two lines of a table would silently get the rule of the last one."""
    tables = read_data_file("resume_rules.toml")
    names = [f"{table}.{name}" for table, rows in tables.items() for row in rows for name in row.split()]
    assert len(names) == len(set(names)) == len(resume_rules())


def test_reference_contains_the_rule_of_each_key() -> None:
    for section in sections():
        lines = reference_text(section).splitlines()
        text = " ".join(" ".join(lines).split())
        for name in fields(section):
            assert resume_rules()[f"{section}.{name}"].sentence in text, name
        assert text.count("Resume: ") == sum(key.startswith(f"{section}.") for key in resume_rules())


def test_keys_with_a_fresh_optimizer() -> None:
    assert keys_of_policy("fresh optimizer") == (
        "optimizer.name",
        "optimizer.sgd.momentum",
        "optimizer.adafactor.beta1",
        "optimizer.muon.matrices",
        "optimizer.muon.momentum",
        "communication.compress",
    )
