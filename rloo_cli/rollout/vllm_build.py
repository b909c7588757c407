"""Builds a vLLM engine inside the trainer's process."""

from __future__ import annotations

import functools
import logging
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rloo_cli.errors import EngineError, RecipeError
from rloo_cli.rollout.vllm_surroundings import guest

CONCURRENT_ROWS = 64
"""Rows of full length that the CPU's key-value cache has room for at once; shorter ones are more."""
CPU_BLOCK = 32
"""Tokens of a cache block on the CPU, the least that its kernels like: prompts are shared in whole blocks."""

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory has its names

VALIDATION_HEADING = re.compile(r"\d+ validation errors? for ")

# What vLLM raises when a model, a value or the memory does not suit it; anything else is a bug.
FAULTS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, OSError, ImportError, NotImplementedError)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What a colocated engine is built from."""

    model_path: str
    revision: str | None
    dtype: str
    max_model_length: int | None
    """Longest prompt + completion in tokens; None = the model's context."""
    gpu_memory_utilization: float
    enable_sleep_mode: bool
    model_impl: str
    trust_remote_code: bool
    seed: int
    tensor_parallel_size: int = 1
    """Neighbouring ranks that share the engine."""
    needs_tokenizer: bool = False
    """Whether vLLM itself has to know the words of tokens, as for completions that have to match something."""


def build_engine(settings: EngineSettings, tokenizer: Any) -> Any:
    """A `vllm.LLMEngine` in this process, with random weights; the process is otherwise as it was.

    Raises:
        RecipeError: sleep mode on a platform without it.
        EngineError: vLLM does not take the model or the settings.
    """
    folder = tempfile.TemporaryDirectory(prefix="rloo-vllm-", ignore_cleanup_errors=True)
    try:
        with guest(_environment()):
            _meet_in(folder.name)
            engine = _build(settings, tokenizer)
    except FAULTS as error:
        folder.cleanup()
        raise EngineError(
            f"vLLM cannot be started with {settings.model_path!r}: {first_line(error)}; the log has its own messages"
        ) from error
    engine.meeting_folder = folder  # removed by `end_engine`, and at the latest when the process ends
    return engine


def end_engine(engine: Any, *, keep_process_group: bool) -> None:
    """End vLLM and release its memory. It would end torch's default process group too, whoever began it."""
    from vllm.distributed import parallel_state

    current = parallel_state.destroy_distributed_environment
    destroy = getattr(current, "__wrapped__", current)  # that of an engine before this one may have been replaced
    parallel_state.destroy_distributed_environment = functools.wraps(destroy)(lambda: None) if keep_process_group else destroy
    with guest():
        engine.engine_core.shutdown()
    engine.meeting_folder.cleanup()


def _meet_in(folder: str) -> None:
    """Have vLLM's process group, even that of one process, put its file into this folder: vLLM itself leaves it in TMPDIR.

    Among several ranks it meets in theirs. Its CPU build names shared memory after the way to meet, which vLLM would have the same in every
    run of a machine; the port at which the ranks met is a run's own.
    """
    from vllm.v1.executor import uniproc_executor

    def among_ranks(executor: Any) -> tuple[str, int, int]:
        return f"rloo:{os.environ['MASTER_PORT']}", torch.distributed.get_rank(), int(os.environ["LOCAL_RANK"])

    uniproc_executor.get_file_store_init_method = lambda: f"file://{folder}/group"
    uniproc_executor.ExecutorWithExternalLauncher._distributed_args = among_ranks


def first_line(error: BaseException) -> str:
    """What the error says, in one line; of a validation error the reason, not the heading."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines if not VALIDATION_HEADING.match(line)]
    return (reasons or lines or [type(error).__name__])[0].partition(" [type=")[0].removeprefix("Value error, ")


def _environment() -> dict[str, str]:
    chosen = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CONFIGURE_LOGGING": "0",  # its loggers then propagate to ours
        "VLLM_NO_USAGE_STATS": "1",
    }
    if not torch.cuda.is_available():
        # A rank that nobody asked for would be compiled at the first token: 7 to 20 seconds and a C++ compiler.
        chosen["TORCHDYNAMO_DISABLE"] = "1"
    return chosen


def _build(settings: EngineSettings, tokenizer: Any) -> Any:
    _quiet()
    from vllm import EngineArgs, LLMEngine
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    if settings.enable_sleep_mode and not current_platform.is_sleep_mode_available():
        raise RecipeError(
            f"vllm_enable_sleep_mode: vLLM cannot give memory back on this platform ({current_platform.device_type}); set it to false"
        )
    if current_platform.is_cpu():
        keep_plain_weights()
        unname_shared_memory()
        # Would bind all memory of this process, the trainer's too, to one NUMA node.
        torch.ops._C.init_cpu_memory_env = lambda nodes: None
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # vLLM overwrites it
    arguments = _arguments(settings, is_cpu=current_platform.is_cpu())
    config = EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS)
    if config.model_config.using_transformers_backend():
        _spare_transformers_classes()
        config = EngineArgs(**arguments | {"enforce_eager": True}).create_engine_config(UsageContext.LLM_CLASS)
    if current_platform.is_cpu():
        config.cache_config.kv_cache_memory_bytes = _cache_bytes(config, settings.gpu_memory_utilization / ranks_here)
    engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
    if current_platform.is_cpu():
        try:
            _try_one_token(engine)
        except FAULTS:
            engine.engine_core.shutdown()  # whenever else it is collected, it ends what a later engine stands on
            raise
    engine.output_processor.tokenizer = tokenizer  # reads text for stop strings alone; its own would be loaded from files again
    return engine


def _spare_transformers_classes() -> None:
    """Keep vLLM from preparing transformers' own model class for compilation: the trainer's model is of the same class."""
    from vllm.model_executor.models.transformers import base

    theirs: Any = base.Base
    theirs._decorate_cls_for_torch_compile = lambda *args, **kwargs: None


def _try_one_token(engine: Any) -> None:
    """Run the model once: which head sizes the CPU's attention takes is told by its kernel alone, and no warm-up asks it."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input

    engine.add_request("probe", tokens_input([0]), SamplingParams(max_tokens=1, temperature=0.0, detokenize=False))
    while engine.has_unfinished_requests():
        engine.step()
    engine.reset_prefix_cache()


def _arguments(settings: EngineSettings, *, is_cpu: bool) -> dict[str, Any]:
    """EngineArgs. Weights are random: the trainer's come before the first row, and a folder may hold none."""
    is_one_of_many = _number_of_ranks() > 1
    cpu: dict[str, Any] = {
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1,  # any explicit size spares a warm-up; the real one is set once the model is known
        "block_size": CPU_BLOCK,
        # A seeded row whose prompt is cut in two dies there ("CPU Generator does not use offset").
        "enable_chunked_prefill": False,
    }
    return {
        "model": settings.model_path,
        "runner": "generate",
        "revision": settings.revision,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_length,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enable_sleep_mode": settings.enable_sleep_mode,
        "model_impl": settings.model_impl,
        "trust_remote_code": settings.trust_remote_code,
        "seed": settings.seed,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "load_format": "dummy",
        "skip_tokenizer_init": not settings.needs_tokenizer,
        "generation_config": "vllm",
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        **({"distributed_executor_backend": "external_launcher"} if is_one_of_many else {}),
        **(cpu if is_cpu else {}),
    }


def _number_of_ranks() -> int:
    is_joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if is_joined else 1


def _cache_bytes(config: Any, most_of_memory: float) -> int:
    """Bytes of keys and values for CONCURRENT_ROWS rows of full length, or less where memory is short, but for one row at least.

    vLLM takes the least of all ranks, so that those that share an engine have as much.
    """
    import psutil

    model, parallel = config.model_config, config.parallel_config
    itemsize = torch.empty((), dtype=model.dtype).element_size()
    token = 2 * model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size() * itemsize
    row = token * (-(-model.max_model_len // CPU_BLOCK) + 1) * CPU_BLOCK
    return max(2 * row, min(CONCURRENT_ROWS * row, int(most_of_memory * psutil.virtual_memory().available)))


def keep_plain_weights() -> None:
    """Have vLLM's CPU layers keep their plain weights beside what its kernels lay out from them, so that new ones can be loaded.

    To be called before a model is built. Without it a linear layer's weight is gone after the first load.
    """
    from vllm.model_executor.layers import utils

    packed = utils.dispatch_cpu_unquantized_gemm
    if getattr(packed, "keeps_plain", False):
        return

    def keeping(layer: torch.nn.Module, remove_weight: bool) -> None:
        packed(layer, remove_weight=False)

    keeping.keeps_plain = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = keeping


def unname_shared_memory() -> None:
    """Have the shared memory in which workers of vLLM's CPU build meet lose its name once all have joined: vLLM leaves it for ever."""
    from vllm.distributed.device_communicators import cpu_communicator

    shared: Any = cpu_communicator._CPUSHMDistributed
    join = shared._init_cpu_shm
    if getattr(join, "unnames", False):
        return

    def joined(self: Any) -> int:
        handle = int(join(self))  # ends with a barrier
        (SHARED_MEMORY / f"{self.group_name}_{self.communicator.rank}").unlink(missing_ok=True)
        return handle

    joined.unnames = True  # type: ignore[attr-defined]
    shared._init_cpu_shm = joined


def lay_out_again(model: torch.nn.Module) -> None:
    """Bring what CPU kernels laid out from the plain weights up to date with them: of a tied head too."""
    from vllm.model_executor.layers import utils

    for module in model.modules():
        if hasattr(module, "cpu_linear"):
            utils.dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _quiet() -> None:
    """Send vLLM's messages through our log alone, also where something imported it before us."""
    for handler in list(logging.getLogger("vllm").handlers):
        logging.getLogger("vllm").removeHandler(handler)
    logging.getLogger("vllm").propagate = True
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # says on the terminal that a CPU has no Triton
