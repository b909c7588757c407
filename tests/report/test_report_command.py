from __future__ import annotations

import webbrowser
from pathlib import Path

import pytest
from synthetic import group, write_run, write_step

from rloo_cli.cli.app import exit_code_of
from rloo_cli.launch import report as launch_report
from rloo_cli.run.folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def reports():
    """Asked for by tests in which training itself writes reports."""


@pytest.fixture
def run(tmp_path, undrawn):
    folder = write_run(tmp_path / "run", steps=12)
    write_step(folder, 1, group(7, [1.0, 0.0]))
    return folder


def test_a_report_goes_into_its_run(run, capsys):
    assert exit_code_of(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"report: {run / 'report.html'}\n"
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_of_several_runs_it_goes_where_one_is_or_is_told(run, tmp_path, capsys, monkeypatch):
    other = write_run(tmp_path / "other", steps=12)
    monkeypatch.chdir(tmp_path)
    assert exit_code_of(["report", str(run), str(other)]) == 0
    assert capsys.readouterr().out == "report: report.html\n"
    assert exit_code_of(["report", str(run), str(other), "-o", str(tmp_path / "both.html")]) == 0
    assert (tmp_path / "both.html").read_text() != ""
    assert not (run / "report.html").exists()


def test_it_is_opened_where_that_is_asked(run, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert exit_code_of(["report", str(run), "--open"]) == 0
    assert opened == [(run / "report.html").as_uri()]


def test_what_cannot_be_reported_is_one_line(tmp_path, capsys):
    assert exit_code_of(["report", str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert "is no run folder" in error
    assert error.count("\n") == 1


def test_where_it_cannot_be_written_is_one_line(run, capsys):
    (run / "report.html").mkdir()
    assert exit_code_of(["report", str(run)]) == 6
    assert capsys.readouterr().err.count("\n") == 1


def test_training_writes_it_and_says_where(reports, tmp_path, capsys):
    assert exit_code_of(["train", "smoke", "--set", "max_steps=1", "--output-dir", str(tmp_path / "run")]) == 0
    assert f"report: {tmp_path / 'run' / 'report.html'}" in capsys.readouterr().out.splitlines()
    page = (tmp_path / "run" / "report.html").read_text()
    assert '<span class="state finished">' in page


def test_a_report_that_fails_is_a_warning(reports, run):
    folder = RunFolder(run)
    folder.report.mkdir()
    line = launch_report.write_report(folder, is_alone=True)
    assert line.startswith("warning: the run is complete, but no report was written (error: ")
    assert line.endswith(f"Again: rloo report {run}")
    assert "\n" not in line


def test_a_report_that_takes_too_long_is_a_warning(reports, run, monkeypatch):
    monkeypatch.setattr(launch_report, "SECONDS_AMONG_RANKS", 0.01)
    assert "took more than 0 s" in launch_report.write_report(RunFolder(run), is_alone=False)
    assert not RunFolder(run).report.exists()
