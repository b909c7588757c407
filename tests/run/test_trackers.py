from __future__ import annotations

import json
import subprocess
import sys
import types

import pytest

from rloo_cli.errors import RecipeError, RefusedError
from rloo_cli.run import trackers as module
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.trackers import Trackers, check_trackers

RECIPE = {"training": {"learning_rate": 1e-6}, "run": {"output_dir": None}}


@pytest.fixture
def folder(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.prepare()
    return run


def open_trackers(folder, *names, **options):
    return Trackers(names, folder=folder, run_name="my run", recipe=RECIPE, **options)


def test_a_missing_package_names_the_install_command(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    check_trackers([])
    with pytest.raises(RecipeError, match=r"wandb, trackio not installed\. `pip install wandb trackio`"):
        check_trackers(["wandb", "trackio"])


def test_tensorboard_gets_the_points_of_the_run_that_counts(folder):
    pytest.importorskip("tensorboard")
    first = open_trackers(folder, "tensorboard")
    for step in (1, 2, 3):
        first.log({"step": step, "reward": step / 10, "rewards/f/mean": 1})
    first.close()
    second = open_trackers(folder, "tensorboard", start_step=1)
    second.log({"step": 2, "reward": 0.25})
    second.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    assert [(event.step, round(event.value, 3)) for event in events.Scalars("reward")] == [(1, 0.1), (2, 0.25)]
    assert events.Tags()["scalars"] == ["reward", "rewards/f/mean"]
    assert "recipe/text_summary" in events.Tags()["tensors"]


class FakeWandb(types.ModuleType):
    class Error(Exception):
        pass

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = types.SimpleNamespace(name="wandb")
        self.inits, self.rows, self.metrics = [], [], []
        self.config = types.SimpleNamespace(update=lambda values, allow_val_change: None)
        self.fails = False

    def init(self, **options):
        if self.fails:
            raise self.Error("no API key configured")
        self.inits.append(options)
        return types.SimpleNamespace(log=self._log, define_metric=lambda *a, **k: self.metrics.append((a, k)), finish=lambda: None)

    def _log(self, values, step=None):
        if self.fails:
            raise self.Error("server gone")
        self.rows.append((values, step))


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_a_resumed_run_goes_on_in_the_same_wandb_run(folder, wandb):
    for start_step in (0, 2):
        trackers = open_trackers(folder, "wandb", start_step=start_step)
        trackers.log({"step": start_step + 1, "reward": 0.5})
        trackers.close()
    first, second = wandb.inits
    assert first["id"] == second["id"] == json.loads(folder.trackers.read_text())["wandb"]
    assert first["resume"] == "allow"
    assert (first["project"], first["name"], first["dir"]) == ("rloo", "my run", str(folder.path))
    # wandb refuses to go back in its own steps, so the step travels as a value that the charts are drawn over.
    assert wandb.rows[0] == ({"step": 1, "reward": 0.5}, None)
    assert wandb.metrics[0] == (("*",), {"step_metric": "step"})


def test_a_tracker_that_fails_is_dropped_with_one_warning(folder, wandb, caplog):
    trackers = open_trackers(folder, "wandb")
    wandb.fails = True
    trackers.log({"step": 1})
    trackers.log({"step": 2})
    trackers.close()
    assert caplog.text.count("server gone") == 1


def test_a_tracker_that_cannot_start_is_refused(folder, wandb):
    wandb.fails = True
    with pytest.raises(RefusedError, match=r"wandb could not be started: no API key configured"):
        open_trackers(folder, "wandb")


def test_trackio_resumes_the_run_of_that_name(folder, monkeypatch):
    fake, inits, rows = types.ModuleType("trackio"), [], []
    run = types.SimpleNamespace(log=lambda values, step: rows.append((values, step)), finish=lambda: None)
    fake.init = lambda **options: inits.append(options) or run
    monkeypatch.setitem(sys.modules, "trackio", fake)
    trackers = open_trackers(folder, "trackio")
    trackers.log({"step": 3, "reward": 0.5})
    trackers.close()
    assert inits == [{"project": "rloo", "name": "my run", "resume": "allow", "config": RECIPE}]
    assert rows == [({"reward": 0.5}, 3)]


def test_the_module_is_light():
    code = "import sys, rloo_cli.run.trackers; print({'torch', 'accelerate', 'wandb'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
