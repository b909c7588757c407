"""`rloo eval`: score a model on the recipe's evaluation split."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rloo_cli.cli.arguments import CodeDirOption, QuietOption, SetOption, TrustOption
from rloo_cli.cli.completion import complete_recipe_or_run


def evaluate(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|RUN",
            show_default=False,
            autocompletion=complete_recipe_or_run,
            help="A recipe (its model as it is), or a run folder (what was trained).",
        ),
    ],
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint", metavar="STEP", show_default=False, help="Of a run: this step's checkpoint, or `latest`; default: final/."
        ),
    ] = None,
    overrides: SetOption = None,
    code_dir: CodeDirOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    trust_remote_code: TrustOption = False,
    quiet: QuietOption = False,
) -> None:
    """Evaluate on `dataset_test_split`: greedy decoding, every reward function, nothing is written.

    \b
    rloo eval recipes/quickstart.yaml                    before training
    rloo eval runs/mine                                  after it
    rloo eval runs/mine --checkpoint 40 --set max_eval_samples=64
    rloo eval runs/mine --set num_generations_eval=4 --set eval_temperature=1     pass@4
    """
    from rloo_cli.launch.evaluate import choose_subject, evaluate_here

    chosen = choose_subject(subject, overrides=overrides or [], code_dir=code_dir, checkpoint=checkpoint)
    metrics = evaluate_here(chosen, trust_remote_code=trust_remote_code, quiet=quiet or as_json)
    if as_json:
        typer.echo(json.dumps(metrics, indent=2))
        return
    from rloo_cli.cli.tables import print_table

    print_table([(key, f"{value:.4g}") for key, value in metrics.items()], header=(chosen.words, "value"))
