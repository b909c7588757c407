"""`rloo export`: a checkpoint as a plain transformers folder, or its adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT",
            show_default=False,
            help="A run folder (its best checkpoint, else its last), or a checkpoint; with --merge also the folder of an adapter.",
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="DIR", show_default=False, help="The folder to write; not there yet, or empty.")],
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", min=0, show_default=False, help="Of a run: this step's checkpoint.")
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None,
        typer.Option("--dtype", show_default=False, help="Round the weights to this type; default: as they were trained."),
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Of an adapter: write its model, with the adapter in the weights.")] = False,
) -> None:
    """Write a checkpoint's model as a transformers folder: configuration, tokenizer, chat template, safetensors.

    \b
    rloo export runs/mine my-model                           the best checkpoint, else the last
    rloo export runs/mine my-model --step 40 --dtype bfloat16
    rloo export runs/mine/checkpoints/000040 my-model
    rloo export --merge runs/lora my-model                   of an adapter (use_peft), a model that needs no peft

    Any checkpoint will do, of one process or of many, of copies (ddp) or of parts (fsdp2, zero2, zero3). It is verified first. No GPU
    is needed, nor the base model, and memory for little more than the largest tensor. Of a run with use_peft it is the adapter that is
    written; with --merge the model that it belongs to, which is then read and held in memory, with the adapter in its weights.
    """
    from rloo_cli.launch import export_adapter
    from rloo_cli.launch.export import ADVICE, choose_checkpoint, refuse_occupied
    from rloo_cli.launch.export import export as write
    from rloo_cli.run.disk_errors import advising, format_bytes

    with advising(ADVICE):
        refuse_occupied(target)
        if merge:
            adapter, words = export_adapter.choose_adapter(str(subject), step)
            typer.echo(f"merging {words} with its model")
            written = export_adapter.merge(adapter, target, dtype=dtype)
        else:
            checkpoint, words = choose_checkpoint(str(subject), step)
            typer.echo(f"exporting {words}")
            written = (export_adapter.export_adapter if export_adapter.holds_adapter(checkpoint) else write)(
                checkpoint, target, dtype=dtype
            )

    size = f"{format_bytes(written.size)} of {written.dtype} weights in {written.files} file{'s' if written.files > 1 else ''}"
    if written.is_adapter:
        typer.echo(
            f"{target}: an adapter, {size}\n"
            f'  peft           AutoPeftModelForCausalLM.from_pretrained("{target}")\n'
            f"  a model        rloo export --merge {target} DIR"
        )
        return
    typer.echo(f'{target}: {size}\n  transformers   AutoModelForCausalLM.from_pretrained("{target}")\n  vLLM           vllm serve {target}')
