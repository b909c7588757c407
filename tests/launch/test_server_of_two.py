"""Two processes that sample from one vLLM server, which is killed, or which they leave because of a signal."""

import re
import signal

import pytest
from processes import free_port
from scripted_server import ScriptedServer, identity_of
from test_several_processes import ROOT, Started, arguments, gold, run
from transformers import AutoConfig

from rloo_cli.run.checkpoint import list_steps
from rloo_cli.run.folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

IDENTITY = identity_of(AutoConfig.from_pretrained(ROOT / "recipes" / "smoke" / "model"), eos=2)


def trained(folder, port, *more, processes=2):
    settings = [
        "use_vllm=true",
        "vllm_mode=server",
        f"vllm_server_base_url=http://127.0.0.1:{port}",
        "vllm_weight_transfer=file",
        "vllm_server_timeout=20",
        "vllm_server_retry_seconds=2",
        "save_steps=100",
    ]
    return arguments(folder, "--num-processes", str(processes), *more, settings=settings)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder, port = tmp_path_factory.mktemp("server") / "whole", free_port()
    with ScriptedServer(IDENTITY, port=port):
        done = run(trained(folder, port))
    assert done.returncode == 0, done.stderr
    return gold(folder)


def test_a_server_that_is_killed_ends_both_with_one_checkpoint_and_resume_goes_on(whole, tmp_path):
    folder, port = tmp_path / "run", free_port()
    with ScriptedServer(IDENTITY, port=port) as server:
        started = Started(trained(folder, port), step=4)
        server.kill()
        code, errors, _ = started.end()
    assert code == 5, errors
    line = re.search(r"^error: vLLM server http://127.0.0.1:\d+: .*Step (\d+) is saved; --resume goes on from there", errors, re.MULTILINE)
    assert line, errors
    assert list_steps(RunFolder(folder).checkpoints) == [int(line[1])]
    with ScriptedServer(IDENTITY, port=port):
        done = run(trained(folder, port, "--resume"))
    assert done.returncode == 0, done.stderr
    assert gold(folder) == whole


def test_a_stop_is_saved_and_gone_on_with(whole, tmp_path):
    folder, port = tmp_path / "run", free_port()
    with ScriptedServer(IDENTITY, port=port) as server:
        started = Started(trained(folder, port), step=4)
        started.process.send_signal(signal.SIGUSR1)
        code, errors, _ = started.end()
        assert code == 75, errors
        done = run(trained(folder, port, "--resume"))
        assert done.returncode == 0, done.stderr
        assert server.process.poll() is None
    assert gold(folder) == whole
