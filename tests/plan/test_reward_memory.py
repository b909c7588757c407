from pathlib import Path

import pytest

from rloo_cli.plan.prepare import check_recipe, reward_runner
from rloo_cli.types import Completion, FinishReason, Group, Prompt, TrainerState

SMOKE = Path(__file__).resolve().parents[2] / "recipes" / "smoke.yaml"
REWARD = "import resource\ndef limit(completions):\n    return [float(resource.getrlimit(resource.RLIMIT_DATA)[0])] * len(completions)\n"


@pytest.mark.parametrize(("setting", "expected"), [("0.5", 2**29), ("null", None)])
def test_a_recipe_may_say_how_much_memory_a_reward_worker_gets(tmp_path, setting, expected):
    (tmp_path / "mine.py").write_text(REWARD)
    overrides = ["rewards=[{function: mine.limit}]", f"reward_memory_gb={setting}", "reward_workers=1"]
    checked = check_recipe(SMOKE, overrides=overrides, code_dir=tmp_path)
    completion = Completion(token_ids=(1,), logprobs=(0.0,), finish_reason=FinishReason.STOPPED, weights_version=0)
    group = Group(prompt=Prompt(row=0, content="?", text="?", token_ids=(1,), columns={}), completions=(completion,), texts=("a",))
    with reward_runner(checked, log_dir=None) as runner:
        runner.start()
        runner.submit(0, group, TrainerState(step=1, max_steps=1))
        ((limit,),) = runner.collect()[0].values
    assert limit == expected if expected is not None else limit >= 2 * 2**30
