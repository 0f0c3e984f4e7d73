"""Tests of sections with tables that one of their keys selects."""

from __future__ import annotations

from typing import Literal

from hpctrain.deck.key import Section, key, table


class RingTable(Section):
    chunks: int = key("Number of chunks.", 4)


class TreeTable(Section):
    width: int = key("Children of a node.", 2)


class Collective(Section):
    algorithm: Literal["ring", "tree", "direct"] = key("Algorithm.", "direct")
    ring: RingTable | None = table("Keys of rings.", selected_by="algorithm")
    tree: TreeTable | None = table("Keys of trees.", selected_by="algorithm")


def test_a_key_that_selects_another_table_gets_its_defaults() -> None:
    ring = Collective(algorithm="ring", ring=RingTable(chunks=8))
    tree = ring.with_values({"algorithm": "tree"})
    assert (tree.ring, tree.tree) == (None, TreeTable())
    assert ring.with_values({"algorithm": "ring"}) == ring
    assert ring.with_values({"algorithm": "direct"}) == Collective()


def test_dotted_keys_go_to_the_table_that_is_selected() -> None:
    ring = Collective(algorithm="ring", ring=RingTable(chunks=8))
    assert ring.with_values({"ring.chunks": 2}).ring == RingTable(chunks=2)
    assert ring.with_values({"algorithm": "tree", "tree.width": 3}).tree == TreeTable(width=3)
    tree = ring.with_values({"algorithm": "tree", "ring.chunks": 2})
    assert (tree.ring, tree.tree) == (None, TreeTable())
