"""`rloo export`: a checkpoint as a plain transformers folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT", show_default=False, help="A run folder (its best checkpoint, else its last), or a checkpoint."
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
) -> None:
    """Write a checkpoint's model as a transformers folder: configuration, tokenizer, chat template, safetensors.

    \b
    rloo export runs/mine my-model                           the best checkpoint, else the last
    rloo export runs/mine my-model --step 40 --dtype bfloat16
    rloo export runs/mine/checkpoints/000040 my-model

    Any checkpoint will do, of one process or of many, of copies (ddp) or of parts (fsdp2, zero2, zero3). It is verified first. No GPU
    is needed, nor the base model, and memory for little more than the largest tensor.
    """
    from rloo_cli.launch.export import ADVICE, choose_checkpoint, refuse_occupied
    from rloo_cli.launch.export import export as write
    from rloo_cli.run.disk_errors import advising, format_bytes

    with advising(ADVICE):
        refuse_occupied(target)
        checkpoint, words = choose_checkpoint(str(subject), step)
        typer.echo(f"exporting {words}")
        written = write(checkpoint, target, dtype=dtype)

    typer.echo(
        f"{target}: {format_bytes(written.size)} of {written.dtype} weights in {written.files} file{'s' if written.files > 1 else ''}\n"
        f'  transformers   AutoModelForCausalLM.from_pretrained("{target}")\n'
        f"  vLLM           vllm serve {target}"
    )
