"""Timer of the examination of a machine. The rest of host/doctor.py is tested in tests/cli/test_doctor.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hpctrain.host import doctor


def test_a_failed_examination_stops_its_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    timer = SimpleNamespace(
        dump_traceback_later=lambda *_, **__: calls.append("start"),
        cancel_dump_traceback_later=lambda: calls.append("stop"),
    )
    monkeypatch.setattr(doctor, "faulthandler", timer)
    broken = SimpleNamespace(COMM_WORLD=None, COMM_TYPE_SHARED=0)
    monkeypatch.setattr(doctor, "_mpi", lambda: (broken, doctor.DoctorFinding("MPI", "broken")))
    with pytest.raises(AttributeError, match="Split_type"), doctor.examine_machine():
        pass
    assert calls == ["start", "stop"]
