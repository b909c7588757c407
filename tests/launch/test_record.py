from __future__ import annotations

import pytest

from rloo_cli.errors import RewardError, StoppedError
from rloo_cli.launch.record import LOG_NOTE, AttemptRecord
from rloo_cli.run.logs import logging_to, read_rank_reports


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (None, 0, ""),
        (RewardError("reward f: row 3: it raised\nmore"), 4, "reward f: row 3: it raised"),
        (StoppedError("stopped by SIGTERM"), 75, "stopped by SIGTERM"),
        (KeyError("x"), 1, "KeyError: 'x'"),
        (KeyboardInterrupt(), 130, "KeyboardInterrupt: "),
    ],
)
def test_the_rank_file_says_how_it_ended(tmp_path, error, code, reason):
    try:
        with AttemptRecord(tmp_path):
            if error is not None:
                raise error
    except type(error) if error is not None else ():
        pass
    (report,) = read_rank_reports(tmp_path)
    assert (report.rank, report.exit_code, report.reason) == (0, code, reason)


def test_the_traceback_goes_to_the_log_and_the_exception_says_where(tmp_path):
    log = tmp_path / "train.log"
    with pytest.raises(ValueError, match="deep inside") as caught, logging_to(log), AttemptRecord(tmp_path):
        raise ValueError("deep inside")
    assert "Traceback (most recent call last)" in log.read_text()
    assert caught.value.__notes__ == [f"{LOG_NOTE}{log}"]
