from __future__ import annotations

import pytest

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
