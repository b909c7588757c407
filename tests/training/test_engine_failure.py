"""An engine that fails costs no step: the state after the last one is saved, and going on gives the bits of a run that never failed."""

import fakes
import pytest
import test_run

from rloo_cli.errors import EngineError
from rloo_cli.run.checkpoint import find_checkpoint, list_steps


class FailingEngine(fakes.FakeEngine):
    """Fails at the `generate` of one step, or at the `load_weights` of one version."""

    def __init__(self, *, step=None, version=None, **options):
        super().__init__(**options)
        self.fails_at_step, self.fails_at_version = step, version

    def generate(self, requests, params, key, **options):
        if key.step == self.fails_at_step:
            raise EngineError("vLLM server http://127.0.0.1:1: connection refused; tried for 3 s")
        return super().generate(requests, params, key, **options)

    def load_weights(self, named_tensors, version):
        if version == self.fails_at_version:
            raise EngineError("vLLM server http://127.0.0.1:1: connection refused; tried for 3 s")
        super().load_weights(named_tensors, version)


@pytest.mark.parametrize(("fault", "saved"), [({"step": 4}, 3), ({"version": 4}, 4), ({"version": test_run.STEPS}, test_run.STEPS)])
def test_the_state_after_the_last_step_is_saved_and_gone_on_with(tmp_path, monkeypatch, fault, saved):
    whole = test_run.gold(test_run.start(tmp_path / "whole", monkeypatch))
    with monkeypatch.context() as patch:
        patch.setattr(fakes, "FakeEngine", lambda **options: FailingEngine(**fault, **options))
        with pytest.raises(EngineError, match=rf"connection refused.*Step {saved} is saved; --resume goes on") as raised:
            test_run.start(tmp_path / "failed", monkeypatch)
    assert raised.value.exit_code == 5
    folder = test_run.RunFolder(tmp_path / "failed")
    assert list_steps(folder.checkpoints) == [saved]
    checkpoint = find_checkpoint(folder.checkpoints, saved)
    assert test_run.gold(test_run.start(folder.path, monkeypatch, resume=checkpoint)) == whole


def test_an_engine_that_fails_before_the_first_step_saves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(fakes, "FakeEngine", lambda **options: FailingEngine(step=1, **options))
    with pytest.raises(EngineError, match="tried for 3 s$"):
        test_run.start(tmp_path / "failed", monkeypatch)
    assert list_steps(test_run.RunFolder(tmp_path / "failed").checkpoints) == []
