"""What a colocated engine leaves alone in the process that it lives in, seen from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent

SCRIPT = """
import json, os, random, signal, sys
sys.path[:0] = [{tests!r}, {tests!r} + "/vllm"]
import numpy, psutil, torch
torch.set_num_threads(2)
from colocated import KEY, build, engine_for, requests
from rloo_cli.rollout.engine import SamplingParams
signal.signal(signal.SIGTERM, lambda *_: None)
model = build("llama")

def state():
    return {{
        "threads": torch.get_num_threads(), "set_num_threads": torch.set_num_threads.__module__ + torch.set_num_threads.__qualname__,
        "cores": sorted(os.sched_getaffinity(0)), "environment": dict(os.environ), "handler": signal.getsignal(signal.SIGTERM).__name__,
        "interrupt": str(signal.getsignal(signal.SIGINT)), "random": [random.getstate()[1][:5], numpy.random.get_state()[1][:5].tolist(), torch.get_rng_state()[:50].tolist()],
        "dtype": str(torch.get_default_dtype()), "gradients": torch.is_grad_enabled(), "children": len(psutil.Process().children()),
        "policy": open("/proc/self/numa_maps").read().count(" bind:") if os.path.exists("/proc/self/numa_maps") else 0,
    }}

states = [state()]
engine = engine_for({folder!r}, model)
states.append(state())
engine.load_weights(model.state_dict().items(), 1)
engine.generate(requests(), SamplingParams(max_new_tokens=8), KEY)
states.append(state())
open({folder!r} + "/meanwhile.json", "w").write(json.dumps(os.listdir(os.environ["TMPDIR"])))
engine.close()
states.append(state())
with open({out!r}, "w") as out:
    json.dump(states, out)
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("process")
    out = folder / "states.json"
    script = SCRIPT.format(tests=str(TESTS), folder=str(folder), out=str(out))
    plain = {name: value for name, value in os.environ.items() if name not in ("TORCH_COMPILE_DISABLE", "OMP_NUM_THREADS")}
    temporary = folder / "temporary"
    temporary.mkdir()
    plain["TMPDIR"] = str(temporary)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=250, env=plain, check=False
    )
    if not out.exists():
        return done, [], {}
    meanwhile, later = json.loads((folder / "meanwhile.json").read_text()), [path.name for path in temporary.iterdir()]
    return done, json.loads(out.read_text()), {"meanwhile": meanwhile, "later": later}


def test_it_ends_well(outcome):
    done, states, _ = outcome
    assert (done.returncode, len(states)) == (0, 4), done.stderr[-2000:]


@pytest.mark.parametrize(
    "what",
    ["threads", "set_num_threads", "cores", "environment", "handler", "interrupt", "random", "dtype", "gradients", "children", "policy"],
)
def test_building_using_and_closing_changes_nothing(outcome, what):
    before, *later = outcome[1]
    assert [state[what] for state in later] == [before[what]] * 3


def test_its_temporary_files_lie_in_a_folder_of_ours_that_goes_with_it(outcome):
    """torch's cache of compiled code stays: it serves the next process."""
    meanwhile, later = ([name for name in names if not name.startswith("torchinductor_")] for names in outcome[2].values())
    assert [name[:10] for name in meanwhile] == ["rloo-vllm-"]
    assert later == []


def test_nothing_but_log_records_reaches_the_terminal(outcome):
    """What stands there without a logging handler of ours are records (Python's last resort prints warnings bare)."""
    done, _, _ = outcome
    assert done.stdout == ""
    assert "Gloo" not in done.stderr
    assert "[W" not in done.stderr  # torch's C++ warnings
    assert "%|" not in done.stderr  # no progress bar
