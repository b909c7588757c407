"""No secret of the environment or of an address can be read in what a run leaves, even where a reward function throws them at the log."""

import os
import subprocess
import sys
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes"
ENVIRONMENT = {
    "HF_TOKEN": "hf_canary-of-the-hub",
    "SERVICE_PASSWORD": "canary-of-a-service",
    "OPENAI_API_KEY": "canary-that-a-reward-gets",
    "DATABASE_URL": "postgres://someone:canary-in-an-address@host/db",
    "DOWNLOAD_URL": "https://host/x.jsonl?rows=3&token=canary-in-a-query",
}
REWARD = """
import os

def telltale(completions, **kwargs):
    raise RuntimeError(f"{dict(os.environ)} Authorization: Bearer canary-in-a-header")
"""


def rloo(folder, *words):
    command = [sys.executable, "-m", "rloo_cli", *words]
    environment = os.environ | ENVIRONMENT | {"HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


def test_secrets_are_nowhere_in_a_run(tmp_path):
    (tmp_path / "tell.py").write_text(REWARD)
    recipe = (RECIPES / "smoke.yaml").read_text().replace("smoke/", f"{RECIPES}/smoke/")
    (tmp_path / "r.yaml").write_text(recipe)
    rewards = "rewards=[{function: tell.telltale, env: [OPENAI_API_KEY], on_error: unscored}]"
    done = rloo(tmp_path, "train", "r.yaml", "-o", "run", "--set", "max_steps=1", "--set", rewards)
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "run" / "logs" / "attempt-1" / "train.log").read_text()
    assert "RuntimeError" in log
    assert "postgres://***@host/db" in log
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            assert b"canary" not in path.read_bytes(), path
    assert "canary" not in done.stdout + done.stderr


def test_secrets_of_an_address_are_not_repeated(tmp_path):
    (tmp_path / "r.yaml").write_text((RECIPES / "smoke.yaml").read_text().replace("smoke/", f"{RECIPES}/smoke/"))
    setting = "dataset_name=https://someone:canary-in-an-address@host/x.jsonl?token=canary-in-a-query"
    done = rloo(
        tmp_path, "train", "r.yaml", "-o", "run", "--code-dir", str(RECIPES), "--set", setting, "--set", "hub_token=canary-in-a-setting"
    )
    assert done.returncode == 2
    assert "https://***@host/x.jsonl?token=***" in done.stderr
    assert "canary" not in done.stdout + done.stderr
    assert not (tmp_path / "run").exists()
