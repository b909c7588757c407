"""Signals that come while there is no training loop yet, and in an evaluation."""

import os
import signal
import time

import pytest

from rloo_cli.errors import StoppedError
from rloo_cli.launch import evaluate, local
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.signals import StopSignal


def stop_before_training(path):
    with StopSignal() as stop, local._stops_before_training_told(RunFolder(path)), stop.at_once():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)


def test_a_stop_before_the_first_step_says_that_resume_starts_again(tmp_path):
    with pytest.raises(StoppedError, match=r"SIGTERM before training began: no step was done, --resume starts again"):
        stop_before_training(tmp_path / "new")


def test_a_stop_while_a_resumed_run_is_loaded_names_the_checkpoint_that_stands(tmp_path):
    for step in (2, 4):
        (tmp_path / "checkpoints" / f"{step:06d}").mkdir(parents=True)
    with pytest.raises(StoppedError, match="the checkpoint of step 4 stands, --resume goes on from there"):
        stop_before_training(tmp_path)


def test_an_evaluation_that_is_stopped_says_that_nothing_is_kept(monkeypatch):
    def long_evaluation(subject, stop, **options):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    monkeypatch.setattr(evaluate, "_evaluate", long_evaluation)
    with pytest.raises(StoppedError, match="stopped by SIGINT: nothing is kept of an evaluation; run it again"):
        evaluate.evaluate_here(None, trust_remote_code=False, quiet=True)
