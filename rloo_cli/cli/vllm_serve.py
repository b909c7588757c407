"""`rloo vllm-serve`: a vLLM server that trainers generate with."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from rloo_cli.cli.arguments import TrustOption
from rloo_cli.errors import RefusedError

LOG_LEVELS = ("debug", "info", "warning", "error", "critical", "trace")
MODEL_IMPLEMENTATIONS = ("auto", "vllm", "transformers")


def vllm_serve(
    model: Annotated[str, typer.Option("--model", metavar="MODEL", show_default=False, help="A model's folder, or its name on the hub.")],
    passed_on: Annotated[
        list[str] | None, typer.Argument(metavar="-- OPTIONS", show_default=False, help="Passed on to vLLM as they are.")
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option("--tensor-parallel-size", min=1, help="GPUs that share one copy of the model.")] = 1,
    data_parallel_size: Annotated[int, typer.Option("--data-parallel-size", min=1, help="Copies of the model.")] = 1,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option("--gpu-memory-utilization", min=0.01, max=1.0, show_default="0.9", help="Share of the device's memory to use."),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option("--dtype", help="float32, or what the trainer samples in: bfloat16. auto: float32 on a CPU, else the model's own."),
    ] = "auto",
    max_model_len: Annotated[
        int | None,
        typer.Option("--max-model-len", min=1, show_default="the model's", help="Most tokens of prompt and completion together."),
    ] = None,
    enable_prefix_caching: Annotated[
        bool | None,
        typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", show_default="vLLM's", help="Compute shared prompts once."),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen at; one that other machines reach needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port")] = 8000,
    key_file: Annotated[
        str | None,
        typer.Option(
            "--key-file", metavar="FILE", show_default=False, help="The key that opens every route; made when the file does not exist."
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", show_default=False, help="Of the model on the hub.")] = None,
    trust_remote_code: TrustOption = False,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs: starts sooner, generates slower.")] = False,
    model_impl: Annotated[str, typer.Option("--model-impl", "--vllm-model-impl", help="vllm, transformers, or auto.")] = "auto",
    log_level: Annotated[str, typer.Option("--log-level", help="What of vLLM's log is shown: debug, info, warning, error.")] = "error",
    print_command: Annotated[bool, typer.Option("--print-command", help="Print the command that starts vLLM, and start nothing.")] = False,
    kv_cache_dtype: Annotated[str | None, typer.Option("--kv-cache-dtype", hidden=True)] = None,
    speculative_config: Annotated[str | None, typer.Option("--speculative-config", hidden=True)] = None,
    distributed_executor_backend: Annotated[str | None, typer.Option("--distributed-executor-backend", hidden=True)] = None,
    config: Annotated[str | None, typer.Option("--config", hidden=True)] = None,
) -> None:
    """Serve a model for training with `vllm_mode: server`, on devices that the trainer does not use.

    \b
    rloo vllm-serve --model Qwen/Qwen2.5-0.5B-Instruct
    CUDA_VISIBLE_DEVICES=2,3 rloo vllm-serve --model M --tensor-parallel-size 2
    rloo vllm-serve --model M --host 0.0.0.0 --key-file ~/.rloo-key      for trainers on other machines
    rloo vllm-serve --model M -- --max-num-seqs 512                      options of vLLM itself

    \b
    When it is ready it prints the lines for the recipe:
      generation:
        use_vllm: true
        vllm_mode: server
        vllm_server_base_url: http://127.0.0.1:8000

    It listens on this machine alone unless --host says otherwise, and then wants a key: --key-file, or RLOO_VLLM_KEY in the
    environment. Only the routes that training needs are open. Ctrl-C or SIGTERM ends it with its workers: exit code 0. When vLLM
    dies, so does the command: exit code 5, with the reason. Options may be spelled with underscores, as in `trl vllm-serve`.
    """
    from rloo_cli.serving import command
    from rloo_cli.serving.address import parse_address
    from rloo_cli.serving.key import find_key

    _refuse_what_trl_has(config, distributed_executor_backend)
    _check_choice("--model-impl", model_impl, MODEL_IMPLEMENTATIONS)
    _check_choice("--log-level", log_level, LOG_LEVELS)
    command.installed_vllm()
    options = command.ServeOptions(
        model=model,
        address=parse_address(host, port),
        revision=revision,
        tensor_parallel_size=tensor_parallel_size,
        data_parallel_size=data_parallel_size,
        gpu_memory_utilization=gpu_memory_utilization,
        dtype=dtype,
        max_model_len=max_model_len,
        enable_prefix_caching=enable_prefix_caching,
        model_impl=model_impl,
        kv_cache_dtype=kv_cache_dtype,
        speculative_config=speculative_config,
        enforce_eager=enforce_eager,
        trust_remote_code=trust_remote_code,
        log_level="debug" if log_level == "trace" else log_level,
        passed_on=tuple(passed_on or ()),
    )
    command.check_passed_on(options.passed_on)
    key = find_key(key_file, os.environ, options.address, create=not print_command)
    if print_command:
        typer.echo(command.printable(options, given=os.environ, key_file=key_file, has_key=key is not None))
        return

    from rloo_cli.serving.serve import Terminal, serve

    if key is not None and key.is_new:
        typer.echo(f"made a key: {key.file}", err=True)
    serve(options, key, Terminal(say=_to_stderr, announce=_to_stdout))


def _to_stderr(line: str) -> None:
    typer.echo(line, err=True)


def _to_stdout(text: str) -> None:
    typer.echo(text)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise RefusedError(f"{name} {value}: one of {', '.join(choices)}.")


def _refuse_what_trl_has(config: str | None, executor: str | None) -> None:
    """Raise RefusedError for options of `trl vllm-serve` that have no place here."""
    if config is not None:
        raise RefusedError("--config: `rloo vllm-serve` reads no configuration file; give the options on the command line.")
    if executor not in (None, "mp"):
        raise RefusedError(
            f"--distributed-executor-backend {executor}: one machine's processes (mp) are what `rloo vllm-serve` can guard and end."
        )
