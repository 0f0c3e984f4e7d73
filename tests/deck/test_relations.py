"""Relations between keys: when they are broken, what is said, and what the reference prints."""

from __future__ import annotations

import pytest

from hpctrain.deck.check import RELATIONS, TRANSFORMER_RELATIONS
from hpctrain.deck.read import parse_deck
from hpctrain.deck.reference import reference_text
from hpctrain.deck.relations import (
    GIVEN,
    Above,
    AtMost,
    Conflicts,
    Divides,
    HasEffectWith,
    OtherThan,
    Relation,
    Relations,
    Requires,
    flattened,
    relation_problems,
    relations_text,
)
from hpctrain.deck.schema import Deck, field_of, sections
from tests.deck.test_check import DECK


def deck_with(**keys: dict[str, object]) -> Deck:
    return parse_deck(DECK).with_keys(**keys)


def sentences(relations: Relations, **keys: dict[str, object]) -> list[str]:
    return [problem.sentence for problem in relation_problems(deck_with(**keys), relations)]


def test_all_relations_are_of_keys_that_exist() -> None:
    for relation in flattened(RELATIONS + TRANSFORMER_RELATIONS):
        for name in (relation.key, relation.other, *relation.further_keys):
            assert field_of(name) is not None, (name, relation)


def test_a_size_must_divide_another() -> None:
    relation = Divides("layout.tensor", "model.hidden")
    assert sentences((relation,), layout={"tensor": 2}, model={"hidden": 64}) == []
    told = sentences((relation,), layout={"tensor": 3}, model={"hidden": 64})
    assert told == ["must divide model.hidden = 64 (use 1, 2, 4 or 8)"]
    assert relation.reference_phrase == "must divide model.hidden"


@pytest.mark.parametrize(("below", "least"), [(False, 9), (True, 8)])
def test_a_number_is_at_most_another(below: bool, least: int) -> None:
    relation = AtMost("batch.ramp_from", "batch.global_size", below=below)
    for size in range(6, 11):
        told = sentences((relation,), batch={"ramp_from": size, "global_size": 8})
        bound = "below" if below else "at most"
        assert told == ([f"must be {bound} batch.global_size = 8"] if size >= least else [])


def test_a_key_requires_a_value_of_another() -> None:
    zero = Requires("memory.accumulate", "layout.zero", (2, 3), because="why")
    assert sentences((zero,), layout={"zero": 0}) == []
    assert sentences((zero,), layout={"zero": 2}, memory={"accumulate": "sliced"}) == []
    told = sentences((zero,), layout={"zero": 1}, memory={"accumulate": "sliced"})
    assert told == ["requires layout.zero = 2 or 3, but it is 1: why"]
    module = Requires("model.blocks", "model.module", GIVEN)
    assert sentences((module,), model={"blocks": "a.*"}) == ["requires model.module, which is not given"]
    above = Requires("batch.ramp_from", "batch.ramp_steps", Above(0))
    assert sentences((above,), batch={"ramp_from": 4}) == ["requires batch.ramp_steps above 0, but it is 0"]
    assert [each.reference_phrase for each in (zero, module, above)] == [
        "requires layout.zero = 2 or 3",
        "requires model.module",
        "requires batch.ramp_steps above 0",
    ]


def test_a_key_without_effect_is_marked_so() -> None:
    relation = HasEffectWith("precision.fp8_watch", "precision.compute", ("fp8",))
    (problem,) = relation_problems(deck_with(precision={"fp8_watch": 1}), (relation,))
    assert problem.sentence == 'has no effect without precision.compute = "fp8" (leave it out)'
    assert problem.no_effect and problem.others == ("precision.compute",)
    many = HasEffectWith("learning_rate.floor", "learning_rate.decay", ("a", "b", "c", "d"))
    told = sentences((many,), learning_rate={"decay": "constant", "floor": 0.5})
    assert told == ['has no effect with learning_rate.decay = "constant" (leave it out)']


def test_a_key_of_a_table_that_the_deck_does_not_have_breaks_nothing() -> None:
    relation = HasEffectWith("communication.server.staleness", "communication.server.mode", ("stale",))
    assert sentences((relation,)) == []


def test_a_conflict_names_the_values_that_fit_all_relations() -> None:
    relations = (
        Conflicts("optimizer.name", "layout.tensor", ("adam-mini", "adafactor"), Above(1), because="why"),
        Conflicts("optimizer.name", "run.trace", OtherThan("sgd", "lion", "adam-mini")),
    )
    assert sentences(relations, optimizer={"name": "adam-mini"}) == []
    told = sentences(relations, optimizer={"name": "adam-mini"}, layout={"tensor": 2}, run={"trace": True})
    assert told == ['conflicts with layout.tensor = 2: why (use "sgd" or "lion")']
    assert [each.reference_phrase for each in flattened(relations)] == [
        '"adam-mini" or "adafactor" conflicts with layout.tensor above 1',
        'other than "sgd", "lion" or "adam-mini" conflicts with run.trace',
    ]


def test_a_conflict_of_a_number_or_a_path_tells_what_to_do() -> None:
    trace = Conflicts("run.trace", "layout.tensor")
    assert sentences((trace,), run={"trace": True}, layout={"tensor": 2}) == [
        "conflicts with layout.tensor = 2 (use false)"
    ]
    rates = Conflicts("machine.rates", "layout.tensor")
    assert sentences((rates,), machine={"rates": "x"}, layout={"tensor": 2}) == [
        "conflicts with layout.tensor = 2 (leave it out)"
    ]


def test_only_the_first_broken_relation_of_a_tuple_is_reported() -> None:
    chain: tuple[Relation, ...] = (
        HasEffectWith("precision.fp8_gather", "precision.compute", ("fp8",)),
        HasEffectWith("precision.fp8_gather", "layout.zero", (3,)),
    )
    told = sentences((chain,), precision={"fp8_gather": True})
    assert told == ['has no effect without precision.compute = "fp8" (leave it out)']
    told = sentences((chain,), precision={"fp8_gather": True, "compute": "fp8"})
    assert told == ["has no effect without layout.zero = 3 (leave it out)"]
    assert len(sentences(chain, precision={"fp8_gather": True})) == 2


def test_the_reference_has_every_relation() -> None:
    assert relations_text("layout.expert", RELATIONS) == (
        "Conflicts with model.module; requires model.experts.count; must divide model.experts.count."
    )
    assert relations_text("layout.chunks", RELATIONS) == ""
    text = " ".join(reference_text().split())
    every = RELATIONS + TRANSFORMER_RELATIONS
    for key in {relation.key for relation in flattened(every)}:
        assert " ".join(relations_text(key, every).split()) in text, key
    assert all(f"[{name}]" in text for name in sections())
