"""Two training processes, each with an engine of its own, in one process group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent

SCRIPT = """
import sys
sys.path[:0] = [{tests!r}, {tests!r} + "/vllm"]
import torch
import torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
from colocated import KEY, PROMPTS, build, engine_for, requests
from rloo_cli.rollout.engine import SamplingParams
model = build("qwen2", 3)
engine = engine_for({folder!r} + str(rank), model)
engine.load_weights(model.state_dict().items(), 1)
mine, length = PROMPTS[rank::2], 10 + 10 * rank  # ranks need not generate equally long
groups = engine.generate(requests(mine, 1), SamplingParams(max_new_tokens=length, temperature=0.0), KEY)
expected = [model.generate(torch.tensor([p]), max_new_tokens=length, do_sample=False)[0, len(p):].tolist() for p in mine]
assert [list(group[0].token_ids) for group in groups] == expected
engine.close()
total = torch.tensor(float(rank + 1))
dist.all_reduce(total)  # the group outlives the engine
assert total == 3
dist.destroy_process_group()
sys.stdout.write(f"rank {{rank}} is done\\n")  # one write: both ranks share the pipe
sys.stdout.flush()
"""


@pytest.mark.slow
def test_two_ranks_generate_and_keep_their_process_group(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT.format(tests=str(TESTS), folder=str(tmp_path / "model")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {"rank 0 is done", "rank 1 is done"} <= set(done.stdout.splitlines())
