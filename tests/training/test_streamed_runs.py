"""Whole runs over streams and mixtures: stopped after any step, or within one, and resumed, they end as one never stopped."""

import json

import fakes
import pytest
import tiny
from test_run import STEPS, gold, start

from rloo_cli.data.prompt_loading import Reader, load_training_prompts
from rloo_cli.errors import DataError, StoppedError
from rloo_cli.recipe.schema import DataSection
from rloo_cli.run.checkpoint import find_checkpoint
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.metrics import read_metrics

READER = Reader(tokenizer=tiny.byte_tokenizer(), max_prompt_tokens=40, is_bounded=True)
DATA = {
    "stream": {"dataset_name": "seven.jsonl", "dataset_streaming": True},
    "mixture": {"datasets": [{"path": "seven.jsonl", "weight": 2}, {"path": "four.jsonl", "weight": 1}]},
    "streamed mixture": {"datasets": [{"path": "seven.jsonl"}, {"path": "four.jsonl"}], "dataset_streaming": True},
}


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, count in (("seven", 7), ("four", 4)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": f"{name} {i}", "i": i}) + "\n" for i in range(count)))


def over(kind, monkeypatch):
    section = DataSection.model_validate({**DATA[kind], "shuffle_buffer_size": 3})
    monkeypatch.setattr(fakes, "make_prompts", lambda *a, **k: load_training_prompts(section, READER))


@pytest.mark.parametrize("changes", [{}, {"training__steps_per_generation": 2}], ids=["a batch a step", "a batch for two steps"])
@pytest.mark.parametrize("kind", DATA)
def test_a_run_stopped_at_any_step_and_resumed_ends_as_one_never_stopped(kind, changes, tmp_path, monkeypatch):
    over(kind, monkeypatch)
    expected = gold(start(tmp_path / "whole", monkeypatch, **changes))
    for k in range(1, STEPS):
        path = tmp_path / f"stopped-{k}"
        with pytest.raises(StoppedError, match=f"SIGTERM: step {k} is saved"):
            start(path, monkeypatch, stop_at=k, **changes)
        start(path, monkeypatch, resume=find_checkpoint(path / "checkpoints"), **changes)
        assert gold(RunFolder(path)) == expected


def test_a_run_that_dies_within_a_generation_batch_draws_its_prompts_again(tmp_path, monkeypatch):
    over("stream", monkeypatch)
    expected = gold(start(tmp_path / "whole", monkeypatch))

    def die(step):
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "killed", monkeypatch, on_generate=die, run__save_steps=2)
    start(tmp_path / "killed", monkeypatch, resume=find_checkpoint(tmp_path / "killed" / "checkpoints"), run__save_steps=2)
    assert gold(RunFolder(tmp_path / "killed")) == expected


def test_the_epoch_is_told_once_a_second_pass_was_begun(tmp_path, monkeypatch):
    over("stream", monkeypatch)
    rows = read_metrics(start(tmp_path / "whole", monkeypatch).metrics)
    assert [row.get("epoch") for row in rows] == [None, None, None, 8 / 7, 10 / 7, 12 / 7]


def test_a_bad_row_ends_the_run_when_it_arrives_and_the_steps_before_are_kept(tmp_path, monkeypatch):
    over("stream", monkeypatch)
    with (tmp_path / "seven.jsonl").open("a") as file:
        file.write("nonsense\n")
    with pytest.raises(DataError, match=r"seven\.jsonl:8: not JSON"):
        start(tmp_path / "run", monkeypatch, run__save_steps=1)
    assert find_checkpoint(tmp_path / "run" / "checkpoints").step == 3


@pytest.mark.parametrize("kind", DATA)
def test_other_data_has_another_fingerprint(kind, tmp_path, monkeypatch):
    over(kind, monkeypatch)
    before = fakes.make_prompts().fingerprint
    (tmp_path / "seven.jsonl").write_text('{"prompt": "other"}\n' * 9)
    assert fakes.make_prompts().fingerprint != before
