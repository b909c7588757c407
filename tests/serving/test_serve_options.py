from __future__ import annotations

import json
import shlex
import socket
import stat
import subprocess
import sys

import pytest

from rloo_cli.cli.app import exit_code_of
from rloo_cli.cli.arguments import expand_serve
from rloo_cli.errors import EngineError, RefusedError
from rloo_cli.recipe.install import install_command
from rloo_cli.serving import command
from rloo_cli.serving.address import Address, check_free, parse_address
from rloo_cli.serving.key import find_key
from rloo_cli.serving.model_folder import check_model

HERE = Address(host="127.0.0.1", port=8000)
EVERYWHERE = Address(host="0.0.0.0", port=8000)
KEY = "0123456789abcdef-key"


def options(**changes):
    return command.ServeOptions(**{"model": "some/model", "address": HERE, **changes})


def argv(*, cpu=False, free_memory=None, **changes):
    return command.build_argv(options(**changes), cpu=cpu, free_memory=free_memory)


def value_of(arguments, name):
    return arguments[arguments.index(name) + 1]


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"tensor_parallel_size": 4}, "--tensor-parallel-size", "4"),
        ({"data_parallel_size": 2}, "--data-parallel-size", "2"),
        ({"gpu_memory_utilization": 0.5}, "--gpu-memory-utilization", "0.5"),
        ({"dtype": "bfloat16"}, "--dtype", "bfloat16"),
        ({"max_model_len": 2048}, "--max-model-len", "2048"),
        ({"revision": "v1"}, "--revision", "v1"),
        ({"model_impl": "transformers"}, "--model-impl", "transformers"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype", "fp8"),
        ({"speculative_config": '{"method": "x"}'}, "--speculative-config", '{"method": "x"}'),
        ({}, "--host", "127.0.0.1"),
        ({}, "--logprobs-mode", "processed_logprobs"),
        ({}, "--worker-extension-cls", "rloo_cli.serving.worker.WorkerExtension"),
    ],
)
def test_an_option_reaches_vllm(given, name, value):
    assert value_of(argv(**given), name) == value


def test_a_cpu_server_computes_in_float32_unless_told():
    assert value_of(argv(cpu=True), "--dtype") == "float32"
    assert value_of(argv(cpu=True, dtype="bfloat16"), "--dtype") == "bfloat16"
    assert value_of(argv(cpu=False), "--dtype") == "auto"


def test_switches_reach_vllm():
    assert "--trust-remote-code" in argv(trust_remote_code=True)
    assert "--enable-prefix-caching" in argv(enable_prefix_caching=True)
    assert "--no-enable-prefix-caching" in argv(enable_prefix_caching=False)
    plain = argv()
    for name in ("--trust-remote-code", "--enable-prefix-caching", "--no-enable-prefix-caching", "--enforce-eager", "--max-model-len"):
        assert name not in plain


def test_our_middleware_is_the_outermost_whatever_is_passed_on():
    arguments = argv(passed_on=("--max-num-seqs", "8"))
    assert arguments[-4:] == ["--max-num-seqs", "8", "--middleware", "rloo_cli.serving.middleware.Gate"]


def test_a_cpu_server_takes_a_quarter_of_the_memory_and_no_more_than_four_gib(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert value_of(argv(cpu=True, free_memory=8 << 30), "--kv-cache-memory-bytes") == str(2 << 30)
    assert value_of(argv(cpu=True, free_memory=900 << 30), "--kv-cache-memory-bytes") == str(4 << 30)
    assert argv(cpu=True, free_memory=8 << 30, enforce_eager=True).count("--enforce-eager") == 1
    assert "--kv-cache-memory-bytes" not in argv(cpu=True, free_memory=8 << 30, gpu_memory_utilization=0.2)
    assert "--kv-cache-memory-bytes" not in argv(cpu=False, free_memory=8 << 30)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert "--kv-cache-memory-bytes" not in argv(cpu=True, free_memory=8 << 30)


def test_vllm_speaks_to_itself_on_the_loopback_and_keeps_its_files_to_itself(tmp_path):
    added = command.settings(options(), cpu=True, given={"OMP_NUM_THREADS": "1"}, scratch=tmp_path)
    assert {added[name] for name in ("VLLM_HOST_IP", "VLLM_LOOPBACK_IP")} == {"127.0.0.1"}
    assert (added["GLOO_SOCKET_IFNAME"], added["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
    assert added["TMPDIR"] == added["VLLM_RPC_BASE_PATH"] == str(tmp_path)
    assert added["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert added["PYTHONSAFEPATH"] == "1"


def test_what_the_user_set_stands_except_for_what_guards():
    given = {"NCCL_SOCKET_IFNAME": "eth0", "VLLM_NO_USAGE_STATS": "0", "VLLM_API_KEY": "x", "VLLM_HOST_IP": "10.0.0.1", "PATH": "/bin"}
    added = command.settings(options(), cpu=False, given=given)
    whole = command.environment(given, added, KEY)
    assert (whole["NCCL_SOCKET_IFNAME"], whole["VLLM_NO_USAGE_STATS"], whole["PATH"]) == ("eth0", "0", "/bin")
    assert (whole["VLLM_HOST_IP"], whole["RLOO_VLLM_KEY"]) == ("127.0.0.1", KEY)
    assert "VLLM_API_KEY" not in whole
    assert "RLOO_VLLM_KEY" not in command.environment({"RLOO_VLLM_KEY": "old"}, added, None)


@pytest.mark.parametrize(
    "name", ["--host", "--middleware", "--api-key", "--api_key", "--port=1", "--uds", "--worker-extension-cls", "--config"]
)
def test_what_would_undo_the_guard_is_not_passed_on(name):
    with pytest.raises(RefusedError, match="cannot be passed on"):
        command.check_passed_on(("--max-num-seqs", "8", name, "x"))


def test_a_model_without_its_option_is_explained():
    with pytest.raises(RefusedError, match="goes after --model"):
        command.check_passed_on(("some/model",))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("--tensor_parallel_size 4", "--tensor-parallel-size 4"),
        ("--gpu_memory_utilization=0.5", "--gpu-memory-utilization=0.5"),
        ("--model some_model_x --max_model_len 9", "--model some_model_x --max-model-len 9"),
        ("--enable_prefix_caching true --port 1", "--enable-prefix-caching --port 1"),
        ("--enable_prefix_caching False", "--no-enable-prefix-caching"),
        ("--enable-prefix-caching --port 1", "--enable-prefix-caching --port 1"),
        ("--enforce_eager False", ""),
        ("--enforce_eager=True", "--enforce-eager"),
        ("--trust_remote_code true", "--trust-remote-code"),
        ("--vllm_model_impl vllm", "--vllm-model-impl vllm"),
        ("--port 1 -- --max_num_seqs 4", "--port 1 -- --max_num_seqs 4"),
    ],
)
def test_the_peers_spelling_is_understood(written, read):
    assert expand_serve(["vllm-serve", *written.split()]) == ["vllm-serve", *read.split()]


def test_other_commands_are_left_alone():
    assert expand_serve(["train", "--output_dir", "x"]) == ["train", "--output_dir", "x"]


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(command, "installed_vllm", lambda: "0.32.0")
    monkeypatch.setattr(command, "runs_on_cpu", lambda: True)
    monkeypatch.delenv("RLOO_VLLM_KEY", raising=False)


def test_print_command_starts_nothing_and_shows_no_key(installed, tmp_path, capsys, monkeypatch):
    (tmp_path / "key").write_text(KEY + "\n")
    (tmp_path / "key").chmod(0o600)
    arguments = ["--model", "some/model", "--tensor_parallel_size", "2", "--print-command", "--key-file", str(tmp_path / "key")]
    assert exit_code_of(["vllm-serve", *arguments, "--", "--max-num-seqs", "3"]) == 0
    line = capsys.readouterr().out
    words = shlex.split(line)
    assert words[0] == "env"
    assert words[words.index("-m") + 1] == "vllm.entrypoints.openai.api_server"
    assert value_of(words, "--tensor-parallel-size") == "2"
    assert f"RLOO_VLLM_KEY=$(cat {tmp_path / 'key'})" in words
    assert KEY not in line


def test_print_command_makes_no_key(installed, tmp_path, capsys):
    assert exit_code_of(["vllm-serve", "--model", "m", "--print-command", "--host", "0.0.0.0", "--key-file", str(tmp_path / "key")]) == 0
    assert not (tmp_path / "key").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--model", "m", "--host", "0.0.0.0"], 2, "it needs a key"),
        (["--model", "m", "--host", "no-such-host.invalid"], 2, "no such host"),
        (["--model", "m", "--port", "70000"], 2, "ports go from 1 to 65535"),
        (["--model", "m", "--config", "x.yaml"], 2, "reads no configuration file"),
        (["--model", "m", "--distributed_executor_backend", "ray"], 2, "guard and end"),
        (["--model", "m", "--vllm_model_impl", "keras"], 2, "one of auto, vllm, transformers"),
        (["--model", "m", "--", "--api-key", "x"], 2, "cannot be passed on"),
        (["some/model", "--model", "m"], 2, "goes after --model"),
        (["--model", "m", "--tensor_parallel_sizes", "2"], 2, "--tensor-parallel-size"),
        (["--model", "/no/such/folder"], 2, "no such folder"),
        ([], 2, "Missing option '--model'"),
    ],
)
def test_what_cannot_be_served_is_one_line(installed, arguments, code, message, capsys):
    assert exit_code_of(["vllm-serve", *arguments]) == code
    errors = capsys.readouterr().err
    assert message in errors
    assert len([line for line in errors.splitlines() if not line.startswith("starting")]) == 1


def test_without_vllm_the_install_command_is_the_answer():
    code = (
        "import importlib.metadata as m, sys\n"
        "find = m.version\n"
        "def version(name):\n"
        "    if name.startswith('vllm'): raise m.PackageNotFoundError(name)\n"
        "    return find(name)\n"
        "m.version = version\n"
        "from rloo_cli.cli.app import exit_code_of\n"
        "print(exit_code_of(['vllm-serve', '--model', 'm']), 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "2 False\n"
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: `rloo vllm-serve` needs vLLM, which is not installed here: {install_command('vllm')} (")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("127.9.9.9", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.1.2.3", False),
    ],
)
def test_who_can_reach_an_address(host, loopback):
    assert parse_address(host, 8000).is_loopback is loopback


def test_an_address_is_told_as_trainers_write_it():
    assert HERE.url == "http://127.0.0.1:8000"
    assert parse_address("::1", 8000).url == "http://[::1]:8000"
    assert EVERYWHERE.url == f"http://{socket.gethostname()}:8000"
    assert EVERYWHERE.near == "127.0.0.1"


def test_a_taken_port_is_told_before_anything_starts():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(EngineError, match=f"port {port} of 127.0.0.1 is in use"):
            check_free(Address(host="127.0.0.1", port=port))
    with pytest.raises(RefusedError, match="cannot listen there"):
        check_free(Address(host="203.0.113.1", port=port))


def test_a_key_file_is_made_for_this_user_alone_and_read_again(tmp_path):
    made = find_key(str(tmp_path / "key"), {}, EVERYWHERE)
    assert made.is_new
    assert len(made.value) >= 40
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    again = find_key(str(tmp_path / "key"), {"RLOO_VLLM_KEY": "another-key-0123456789"}, EVERYWHERE)
    assert (again.value, again.is_new) == (made.value, False)
    assert made.value not in repr(made)


def test_the_environments_key_serves_too():
    assert find_key(None, {"RLOO_VLLM_KEY": KEY}, EVERYWHERE).value == KEY
    assert find_key(None, {}, HERE) is None
    with pytest.raises(RefusedError, match="it needs a key"):
        find_key(None, {}, EVERYWHERE)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620, 0o601])
def test_a_key_that_others_can_read_is_refused(tmp_path, mode):
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "key").chmod(mode)
    with pytest.raises(RefusedError, match="chmod 600"):
        find_key(str(tmp_path / "key"), {}, HERE)


def test_a_group_may_read_a_key(tmp_path):
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "key").chmod(0o640)
    assert find_key(str(tmp_path / "key"), {}, HERE).value == KEY


@pytest.mark.parametrize("text", ["", "short", "two words of a longer key", "ключ-которого-не-послать", "x" * 5000])
def test_what_is_no_key_is_refused(tmp_path, text):
    (tmp_path / "key").write_text(text)
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(RefusedError, match="one word of 16"):
        find_key(str(tmp_path / "key"), {}, HERE)


def test_a_key_without_a_folder_is_refused(tmp_path):
    with pytest.raises(RefusedError, match="there is no folder"):
        find_key(str(tmp_path / "no" / "key"), {}, HERE)
    with pytest.raises(RefusedError, match="not a file"):
        find_key(str(tmp_path), {}, HERE)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 64, "num_attention_heads": 2}))
    return folder


def test_a_whole_folder_and_a_hub_name_pass(model):
    check_model(str(model), cpu=True)
    check_model("some-org/some-model", cpu=True)
    (model / "model.safetensors").unlink()
    check_model(str(model), cpu=True, passed_on=("--load-format", "dummy"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: (m / "config.json").unlink(), "no config.json"),
        (lambda m: (m / "config.json").write_text("{"), "cannot be read"),
        (lambda m: (m / "config.json").write_text("[" * 100_000), "cannot be read"),
        (lambda m: (m / "config.json").write_text("[]"), "not a JSON object"),
        (lambda m: (m / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda m: (m / "model.safetensors").unlink(), "no weights in this folder"),
        (lambda m: (m / "config.json").write_text('{"head_dim": 16}'), "heads of size 16"),
        (lambda m: (m / "config.json").write_text('{"text_config": {"hidden_size": 64, "num_attention_heads": 4}}'), "heads of size 16"),
    ],
)
def test_what_a_folder_lacks_is_told_at_once(model, spoil, message):
    spoil(model)
    with pytest.raises(RefusedError, match=message):
        check_model(str(model), cpu=True)


def test_a_run_folder_is_pointed_to_its_model(model):
    (model / "config.json").unlink()
    (model / "recipe.yaml").write_text("")
    with pytest.raises(RefusedError, match="in final/"):
        check_model(str(model), cpu=True)


def test_heads_of_any_size_pass_on_a_gpu_and_latent_attention_everywhere(model):
    (model / "config.json").write_text('{"head_dim": 16}')
    check_model(str(model), cpu=False)
    (model / "config.json").write_text('{"head_dim": 16, "kv_lora_rank": 8}')
    check_model(str(model), cpu=True)


def test_the_scratch_folder_leaves_room_for_sockets(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/" + "x" * 90)
    assert command.scratch_parent() == "/tmp"
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    assert command.scratch_parent() is None
