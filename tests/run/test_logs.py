from __future__ import annotations

import errno
import logging
import warnings

from failpoints import FailingFileSystem

from rloo_cli.run import atomic
from rloo_cli.run.logs import RankReport, logging_to, read_rank_reports, write_rank_report


def test_the_file_has_everything_and_the_terminal_our_warnings_in_one_line(tmp_path):
    shown = []
    with logging_to(tmp_path / "train.log", show=shown.append):
        try:
            1 // 0
        except ZeroDivisionError:
            logging.getLogger("rloo_cli.rewards").exception("reward f failed on row %d", 3)
        logging.getLogger("rloo_cli.run").info("saved")
        logging.getLogger("some.library").warning("noise")
        warnings.warn("python's own", stacklevel=1)
    text = (tmp_path / "train.log").read_text()
    assert shown == ["error: reward f failed on row 3"]
    for part in ("Traceback", "ZeroDivisionError", "saved", "noise", "python's own"):
        assert part in text


def test_afterwards_logging_is_as_it_was(tmp_path):
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    with logging_to(tmp_path / "train.log", show=print):
        assert len(root.handlers) == len(before[1]) + 2
    assert (root.level, root.handlers) == before


def test_secrets_are_masked(tmp_path):
    environment = {"OPENAI_API_KEY": "sk-abcdefgh", "HF_TOKEN": "hf_12345678", "KEYBOARD": "qwertz-layout", "A_KEY": "short"}
    with logging_to(tmp_path / "train.log", environment=environment):
        logging.getLogger("x").error("401 for sk-abcdefgh with qwertz-layout")
    assert "401 for *** with qwertz-layout" in (tmp_path / "train.log").read_text()


def test_lone_surrogates_do_not_break_the_log(tmp_path):
    with logging_to(tmp_path / "train.log"):
        logging.getLogger("x").error("\ud800")
    assert "\\ud800" in (tmp_path / "train.log").read_text()


def test_a_full_disk_drops_records_and_counts_them(tmp_path, monkeypatch):
    with logging_to(tmp_path / "train.log") as log_file:
        logging.getLogger("x").error("first")
        monkeypatch.setattr(atomic, "fs", FailingFileSystem(1, errno.ENOSPC, only=("write",)))
        logging.getLogger("x").error("second")
        logging.getLogger("x").error("third")
    assert log_file.dropped == 1
    assert [line.rpartition(" ")[2] for line in (tmp_path / "train.log").read_text().splitlines()] == ["first", "third"]


def report(rank, code, *, neighbour=False):
    return RankReport(rank=rank, exit_code=code, reason="r" if code else "", neighbour=neighbour)


def test_rank_reports_are_read_back_by_rank(tmp_path):
    for rank in (10, 0, 2):
        write_rank_report(tmp_path, report(rank, 0))
    assert [entry.rank for entry in read_rank_reports(tmp_path)] == [0, 2, 10]
