"""Rules between the fields of vLLM; see `rules`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from rloo_cli.recipe.rules import Context, Finding, Rule

COLOCATE_FIELDS: tuple[str, ...] = (
    "vllm_model_impl",
    "vllm_gpu_memory_utilization",
    "vllm_tensor_parallel_size",
    "vllm_max_model_length",
    "vllm_enable_sleep_mode",
)
SERVER_FIELDS: tuple[str, ...] = (
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_server_key_file",
    "vllm_server_timeout",
    "vllm_server_retry_seconds",
    "vllm_weight_transfer",
    "vllm_weight_transfer_dir",
    "vllm_group_port",
)


def _not_read(context: Context) -> Iterator[Finding]:
    """Fields of vLLM that the chosen engine does not read."""
    generation, unread = context.recipe.generation, COLOCATE_FIELDS
    if not generation.use_vllm:
        unread, reason = ("vllm_mode", *COLOCATE_FIELDS, *SERVER_FIELDS), "use_vllm is false."
    elif generation.vllm_mode == "server":
        unread, reason = COLOCATE_FIELDS, "it is an option of `rloo vllm-serve`, where vllm_mode is server."
    else:
        unread, reason = SERVER_FIELDS, "vllm_mode is colocate."
    for name in unread:
        if context.is_changed(f"generation.{name}"):
            yield Finding(f"generation.{name}", f"not read: {reason}", is_notice=True)


def _address(context: Context) -> Iterator[Finding]:
    generation = context.recipe.generation
    url = generation.vllm_server_base_url
    if url is None:
        return
    fault = _url_fault(url)
    if fault:
        yield Finding("generation.vllm_server_base_url", f"{fault}; write it as http://HOST:PORT.")
    for name in ("generation.vllm_server_host", "generation.vllm_server_port"):
        if context.is_changed(name):
            yield Finding(name, "not read: vllm_server_base_url says where the server is.", is_notice=True)


def _url_fault(url: str) -> str:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        return f"no address ({error})"
    if parts.username is not None or parts.password is not None:
        return "a recipe is copied into the run's folder and is no place for secrets (the key goes into vllm_server_key_file)"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "no address of a web server"
    if parts.query or parts.fragment or any(character.isspace() for character in url):
        return "an address with more than host, port and path"
    return ""


def _transfer(context: Context) -> Iterator[Finding]:
    generation = context.recipe.generation
    if generation.vllm_weight_transfer != "file" and context.is_changed("generation.vllm_weight_transfer_dir"):
        yield Finding(
            "generation.vllm_weight_transfer_dir", f"not read: vllm_weight_transfer is {generation.vllm_weight_transfer}.", is_notice=True
        )
    if generation.vllm_weight_transfer == "file" and context.is_changed("generation.vllm_group_port"):
        yield Finding("generation.vllm_group_port", "not read: vllm_weight_transfer is file.", is_notice=True)


def _overlap(context: Context) -> Iterator[Finding]:
    recipe = context.recipe
    if not recipe.training.async_steps:
        return
    if not (recipe.generation.use_vllm and recipe.generation.vllm_mode == "server"):
        yield Finding(
            "training.async_steps",
            "generation and update overlap only where each has a device of its own: write `use_vllm: true` and `vllm_mode: server`.",
        )
        return
    for name in ("algorithm.epsilon", "algorithm.epsilon_high"):
        if context.is_changed(name):
            yield Finding(
                name, "not read: with async_steps rows carry a capped ratio to the sampler (importance_sampling_cap).", is_notice=True
            )


def _tensor_parallel(context: Context) -> Iterator[Finding]:
    generation, count = context.recipe.generation, context.num_processes
    size = generation.vllm_tensor_parallel_size
    if generation.use_vllm and generation.vllm_mode == "colocate" and count % size:
        fitting = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        yield Finding(
            "generation.vllm_tensor_parallel_size",
            f"{size} processes share an engine, and {count} train (run.num_processes), which cannot be grouped so: {fitting} would fit.",
        )


def _structured(context: Context) -> Iterator[Finding]:
    field, generation = "generation.vllm_structured_outputs_regex", context.recipe.generation
    if generation.vllm_structured_outputs_regex is None:
        return
    if not generation.use_vllm:
        yield Finding(field, "only vLLM draws completions that match an expression: write `use_vllm: true`, or remove it.")
    elif not generation.vllm_structured_outputs_regex:
        yield Finding(field, "an empty expression matches the empty completion alone; remove it.")
    elif generation.stop:
        yield Finding(field, "with it completions end where the expression does, and `stop` could cut them before: keep one of the two.")


def _rule(check: Callable[[Context], Iterator[Finding]], *reads: str) -> Rule:
    return Rule(frozenset(reads), check)


VLLM_RULES = (
    _rule(_tensor_parallel, "generation.use_vllm", "generation.vllm_mode", "generation.vllm_tensor_parallel_size"),
    _rule(_structured, "generation.use_vllm", "generation.vllm_structured_outputs_regex", "generation.stop"),
    _rule(_not_read, "generation.use_vllm", "generation.vllm_mode"),
    _rule(_address, "generation.vllm_server_base_url"),
    _rule(_transfer, "generation.vllm_weight_transfer", "generation.vllm_weight_transfer_dir", "generation.vllm_group_port"),
    _rule(_overlap, "training.async_steps", "generation.use_vllm", "generation.vllm_mode", "algorithm.epsilon", "algorithm.epsilon_high"),
)
