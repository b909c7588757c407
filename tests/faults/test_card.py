"""Every row of the fault scorecard has its five points. Quick rows share one process, since importing takes longer than they do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import card
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
FAULTS = card.all_faults()
QUICK_ROWS_SECONDS, SLOW_ROW_SECONDS = 600, 900
"""Wide room for a busy machine: the quick ones take under a minute together."""


def run_rows(ids, file, timeout):
    command = [sys.executable, "-m", "tests.faults", *ids, "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    assert file.exists(), done.stdout + done.stderr
    return {result.id: result for result in card.from_json(file.read_text())}


@pytest.fixture(scope="module")
def quick_results(request, tmp_path_factory):
    """Results of the quick rows that were selected."""
    asked = [item.callspec.params["entry"].id for item in request.session.items if item.name.startswith("test_a_quick_fault")]
    return run_rows(asked, tmp_path_factory.mktemp("card") / "results.json", timeout=QUICK_ROWS_SECONDS - 20)


@pytest.mark.timeout(QUICK_ROWS_SECONDS)
@pytest.mark.parametrize("entry", [entry for entry in FAULTS if entry.quick], ids=lambda entry: entry.id)
def test_a_quick_fault_has_its_points(entry, quick_results):
    assert not quick_results[entry.id].failures()


@pytest.mark.slow
@pytest.mark.timeout(SLOW_ROW_SECONDS)
@pytest.mark.parametrize("entry", [entry for entry in FAULTS if not entry.quick], ids=lambda entry: entry.id)
def test_a_slow_fault_has_its_points(entry, tmp_path):
    assert not run_rows([entry.id], tmp_path / "results.json", timeout=SLOW_ROW_SECONDS - 20)[entry.id].failures()


def test_a_row_that_looks_at_nothing_or_fails_earns_nothing():
    def breaks(bench):
        raise ValueError("no")

    from contextlib import nullcontext

    silent = card.Fault(id="Z1", title="silent", row=lambda bench: None, quick=True)
    broken = card.Fault(id="Z2", title="broken", row=breaks, quick=True)
    results = [card.run_row(entry, nullcontext) for entry in (silent, broken)]
    assert [result.points for result in results] == [0, 0]
    assert "the row itself failed: ValueError: no" in results[1].failures()[0]


def test_one_miss_costs_the_point():
    result = card.Result(id="Z3", title="x")
    result.expect("message", True, "fine")
    result.expect("message", False, "no place in it")
    result.expect("exit code", True, "6")
    assert result.points == 1
    assert "message: no place in it" in result.failures()
    assert card.from_json(card.to_json([result])) == [result]


def test_the_page_on_reliability_lists_every_row():
    page = (ROOT / "docs" / "reliability.md").read_text()
    table = page.partition("<!-- scorecard -->\n")[2].partition("<!-- end of scorecard -->")[0]
    rows = [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in table.splitlines()[2:]]
    wanted = [(entry.id, entry.title.replace("|", "\\|")) for entry in FAULTS]
    assert rows == wanted, "print it anew by `python -m tests.faults --markdown --json RESULTS`"
