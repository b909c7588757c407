from __future__ import annotations

import pytest

from rloo_cli.cli.app import exit_code_of
from rloo_cli.cli.arguments import expand_resume


@pytest.mark.parametrize(
    ("given", "expanded"),
    [
        (["train", "r.yaml", "--resume"], ["train", "r.yaml", "--resume=latest"]),
        (["train", "--resume", "r.yaml"], ["train", "--resume=latest", "r.yaml"]),
        (["train", "--resume", "-q", "r.yaml"], ["train", "--resume=latest", "-q", "r.yaml"]),
        (["train", "r.yaml", "--resume", "40"], ["train", "r.yaml", "--resume=40"]),
        (["train", "r.yaml", "--resume=40"], ["train", "r.yaml", "--resume=40"]),
        (["train", "r.yaml", "--resume", "auto"], ["train", "r.yaml", "--resume=auto"]),
        (["train", "r.yaml", "--resume=runs/x/checkpoints/000040"], ["train", "r.yaml", "--resume=runs/x/checkpoints/000040"]),
        (["train", "--", "--resume"], ["train", "--", "--resume"]),
        (["plan", "r.yaml"], ["plan", "r.yaml"]),
    ],
)
def test_resume_takes_a_value_or_none(given, expanded):
    assert expand_resume(given) == expanded


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train", "smoke", "--num-processes", "two"], "'two' is neither a number from 1 nor auto. `"),
        (["plan", "smoke", "--num-processes", "0"], "'0' is neither a number from 1 nor auto. `"),
        (["train", "smoke", "--machine-rank", "x"], "as an integer. `"),
        (["train", "smoke", "--output_dir", "x"], "No such option: --output_dir (Possible options: --output-dir). `"),
        (["plan", "smoke", "--accelerate-config", "fsdp"], "error: --accelerate-config fsdp: run.accelerate_config: `fsdp` is none of"),
        (["plan", "smoke", "--set", "num_processes=0"], "error: --set num_processes=0: run.num_processes: "),
        (["plan", "smoke", "--num-processes", "99999999999"], "error: --num-processes 99999999999: run.num_processes: "),
        (["slurm", "smoke", "--gpus-per-node", "0", "--accelerate-config", "fsdp"], "error: --accelerate-config fsdp: "),
    ],
)
def test_a_wrong_option_is_named_as_it_was_given(words, says, capsys):
    assert exit_code_of(words) == 2
    assert says in capsys.readouterr().err


def test_as_many_processes_as_there_are_can_be_asked_for(capsys):
    assert exit_code_of(["plan", "smoke", "--no-model", "--json", "--num-processes", "auto"]) == 0
    assert "--num-processes auto" in capsys.readouterr().out
