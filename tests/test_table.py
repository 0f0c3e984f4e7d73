from __future__ import annotations

from hpctrain.table import fitted, table

ROWS = [("run", "state", "step"), ("runs/a", "running", "5/20"), ("runs/b", "", "20/20")]


def test_a_table_that_fits_is_one() -> None:
    assert fitted(ROWS, (0, 1), 22) == table(ROWS, (0, 1)) == fitted(ROWS, (0, 1), None)
    assert max(map(len, table(ROWS, (0, 1)))) == 22


def test_rows_that_do_not_fit_are_lists() -> None:
    assert fitted(ROWS, (0, 1), 21) == [
        "runs/a",
        "  state  running",
        "  step   5/20",
        "runs/b",
        "  step   20/20",
    ]
