"""Letters from whoever sends, what the ledger counts of them, and parts of a world.

Tests of comm/mailbox.py and of `World.subworld`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpctrain.comm.hangs.hang_report import diagnose, take_report, write_report
from hpctrain.comm.mailbox import Mailbox, MailboxHeader
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.world import World
from hpctrain.errors import HpctrainError


def fail(here: bool) -> None:
    if here:
        raise HpctrainError("of the last")


def mailbox(world: World) -> Mailbox:
    return Mailbox(world.new_group(("letters",), tuple(range(world.size)), "mpi"))


@pytest.mark.mpi(min_size=2)
def test_letters_of_all_ranks_come_each_once_and_in_their_order(world: World) -> None:
    """The others send letters of growing length, tensors behind them; rank 0 takes them as they come."""
    box, each = mailbox(world), 5
    if world.rank:
        for number in range(each):
            tensor = torch.full((number,), float(10 * world.rank + number))
            box.send(0, [world.rank, number, *[0.5] * number], tensor)
        box.wait_for_sends()
    else:
        came: dict[int, list[int]] = {rank: [] for rank in range(1, world.size)}
        for _ in range(each * (world.size - 1)):
            letter = box.wait_for_header()
            sender, number, *rest = letter.numbers
            assert letter.sender == sender and rest == [0.5] * int(number)
            tensor = box.receive_tensor(letter.sender, torch.empty(int(number)))
            assert tensor.tolist() == [10 * sender + number] * int(number)
            came[letter.sender].append(int(number))
        assert came == {rank: list(range(each)) for rank in range(1, world.size)}
        assert box.poll() is None
    world.everyone.barrier()


@pytest.mark.mpi(min_size=2, max_size=2)
def test_the_ledger_counts_numbers_and_tensors_where_they_are_sent(world: World) -> None:
    box = mailbox(world)
    world.ledger.reset()
    if world.rank == 0:
        box.send(1, [1, 2, 3], torch.zeros(10, dtype=torch.bfloat16))
        box.send_tensors(1, torch.zeros(2), torch.zeros(0))
        box.wait_for_sends()
        assert box.sends_complete()
    else:
        assert box.wait_for_header() == MailboxHeader(0, (1, 2, 3))
        box.receive_tensor(0, torch.empty(10, dtype=torch.bfloat16))
        box.receive_tensor(0, torch.empty(2))
    sent = {row.operation: (row.calls, row.bytes) for row in world.ledger.rows() if row.axis == "letters"}
    assert sent == ({"send": (3, 3 * 8 + 10 * 2 + 2 * 4)} if world.rank == 0 else {"recv": (3, 0)})


@pytest.mark.mpi(min_size=2, max_size=2)
def test_who_waits_for_letters_gives_no_sign_of_life_and_a_report_says_so(
    world: World, mpi_tmp_path: Path
) -> None:
    """Else a run in which all wait would never be found to hang."""
    box, seen = mailbox(world), []
    calls = world.ledger.calls
    if world.rank == 0:

        def meanwhile() -> None:
            seen.append((calls.current, calls.signs_of_life, calls.recent[-1] if calls.recent else None))
            if len(seen) == 3:
                report = take_report(world, "token", 9.0)
                assert "wait for messages of letters (ranks 0-1)" in report.state
                write_report(mpi_tmp_path / "hang.0.txt", report, 2)
                assert any("wait for messages" in line for line in diagnose({0: report}, 1))
                box.send(1, [0])

        assert box.wait_for_header(meanwhile).numbers == (1,)
        assert calls.current is None
        assert len(seen) >= 3 and len(set(seen[:3])) == 1
    else:
        box.wait_for_header()
        box.send(0, [1])
    box.wait_for_sends()


@pytest.mark.mpi(min_size=2)
def test_a_part_of_a_world_communicates_and_agrees_by_itself(world: World) -> None:
    """The first rank is one part, the others are another one; the ledger is that of the whole."""
    mine = range(1) if world.rank == 0 else range(1, world.size)
    part = world.subworld(mine)
    assert (part.rank, part.size, part.ledger) == (world.rank - mine.start, len(mine), world.ledger)
    assert part.everyone.all_gather_object(world.rank) == list(mine)
    mesh = Mesh(part, {"data": part.size})
    total = mesh.group("data").all_reduce(torch.tensor([world.rank]))
    assert total.item() == sum(mine)
    # A hang is told by the ranks of the whole.
    assert mesh.group("data").calls.ranks == tuple(mine) and mesh.group("data").ranks == tuple(
        range(len(mine))
    )
    if world.rank:
        with pytest.raises(HpctrainError, match="of the last") as caught, part.agreement():
            fail(part.rank == part.size - 1)
        assert part.is_agreed(caught.value)
    nested = part.subworld((part.rank,))
    assert nested.everyone.calls.ranks == (world.rank,)
