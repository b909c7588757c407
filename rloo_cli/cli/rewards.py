"""`rloo rewards`: which reward functions there are, what one does before it is trained with, and a new one to start from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rloo_cli.errors import DataError, RewardError

if TYPE_CHECKING:
    from rloo_cli.inspect.reward_check import CheckedReward

app = typer.Typer(
    help="""Reward functions: which there are, whether one does what you think, and a new one to start from.

    \b
    rloo rewards ls                                the built-in ones
    rloo rewards new my_reward                     my_reward.py and a test of it
    rloo rewards check my_reward.my_reward --data prompts.jsonl
    rloo rewards check my-task/recipe.yaml         those of a recipe, on its data

    A reward is the only thing that a model learns from: a minute here spares hours of training towards the wrong thing.
    """,
    no_args_is_help=True,
    rich_markup_mode=None,
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.command("ls", short_help="List the built-in reward functions.")
def list_rewards(
    code_dir: Annotated[
        str | None,
        typer.Option(
            "--code-dir", metavar="DIR", show_default=False, help="List the functions of this folder too, such as a recipe's own."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the built-in rewards, a line each, and with --code-dir those of your modules (functions that take `completions`).

    \b
    rloo rewards ls
    rloo rewards ls --code-dir my-task
    """
    from rloo_cli.cli.page import new_console, print_json, print_page
    from rloo_cli.inspect.reward_names import built_in_rewards, rewards_below

    built_in = built_in_rewards()
    own, unreadable = rewards_below(Path(code_dir)) if code_dir is not None else ([], [])
    if as_json:
        print_json({"built_in": built_in, "own": own, "unreadable": unreadable})
    elif not sys.stdout.isatty():
        from rloo_cli.cli.tables import print_table

        rows = [(name.function, ", ".join(name.settings), name.summary) for name in [*own, *built_in]]
        print_table(rows, header=("function", "settings", "what it gives"))
    else:
        from rich.text import Text

        from rloo_cli.cli.rewards_view import names_table

        parts = [names_table(own), Text(), names_table(built_in)] if own else [names_table(built_in)]
        print_page(new_console(), parts)
        if code_dir is not None and not own:
            typer.echo(f"{code_dir}: no module there has a function that takes `completions`", err=True)
    for line in unreadable:
        typer.echo(f"note: not read: {line}", err=True)


@app.command("check", short_help="Try a reward function on completions of known worth.")
def check(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="SPEC|RECIPE",
            show_default=False,
            help="A built-in's name, module.function, or a recipe or run folder (all of its rewards).",
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            "--data", metavar="FILE", show_default=False, help="Prompts with their columns: .jsonl, .csv, .parquet, a folder, a hub id."
        ),
    ] = None,
    count: Annotated[int, typer.Option("-n", min=1, metavar="N", help="How many rows to try it on.")] = 8,
    completions: Annotated[
        str | None,
        typer.Option(
            "--completions",
            metavar="FILE",
            show_default=False,
            help="Completions of your own: a column `completion`, and `prompt_row` where they are not in the order of the data. Rollout files work.",
        ),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(
            "--column", metavar="NAME", show_default=False, help="The gold answers; default: solution, else answer, else ground_truth."
        ),
    ] = None,
    prompt_column: Annotated[
        str | None,
        typer.Option("--prompt-column", metavar="NAME", show_default=False, help="The prompts; default: prompt, or as in the recipe."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option("--split", metavar="NAME", show_default=False, help="Which split of the data; default: train, or as in the recipe."),
    ] = None,
    kwargs: Annotated[
        str | None, typer.Option("--kwargs", metavar="YAML", show_default=False, help="Arguments of the function, such as '{limit: 200}'.")
    ] = None,
    code_dir: Annotated[
        str | None,
        typer.Option(
            "--code-dir", metavar="DIR", show_default=False, help="Where it is imported from; default: here, or the recipe's folder."
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            min=0.01,
            metavar="SECONDS",
            show_default=False,
            help="What a completion may take; default: 5, or as in the recipe.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Try a reward function on real rows, with completions whose worth is known, in the workers that training uses.

    Each row is answered by its gold answer, by junk, by nothing, and by an answer that was cut off. The table shows what each of them
    gets; warnings tell of rewards that are constant, always None, slow, paid for silence or for junk, and of failures (exit code 4).

    \b
    rloo rewards check my_reward.my_reward --data prompts.jsonl
    rloo rewards check accuracy_reward --data train.jsonl --column final_answer
    rloo rewards check my_reward.my_reward --data prompts.jsonl \\
                       --completions mine.jsonl -n 20
    rloo rewards check recipes/quickstart.yaml
    """
    from rloo_cli.cli.checking import CheckRequest, chosen_rewards, means_recipe
    from rloo_cli.cli.page import new_console, plain, print_json, print_page

    is_recipe = means_recipe(subject)
    if is_recipe and (data or kwargs):
        raise typer.BadParameter("a recipe has its own; leave it out, or check one function.", param_hint="--data, --kwargs")
    if not is_recipe and data is None:
        raise typer.BadParameter("name the prompts that it is tried on: --data FILE.", param_hint="--data")
    request = CheckRequest(
        subject=subject,
        data=data,
        prompt_column=prompt_column,
        split=split,
        column=column,
        kwargs=kwargs,
        code_dir=code_dir,
        timeout=timeout,
        count=count,
        completions=completions,
    )
    chosen = chosen_rewards(request)
    results: list[CheckedReward] = []
    console = new_console()
    for entry in chosen.entries:
        results.append(chosen.check(entry))
        if not as_json:
            from rloo_cli.cli.rewards_view import check_parts

            print_page(console, check_parts(console, results[-1], chosen.data))
    if as_json:
        documents = [{**plain(checked), "failures": checked.failures, "seconds": checked.seconds} for checked in results]
        print_json({"data": chosen.data.source, "gold_column": chosen.data.gold_column, "rewards": documents})
    _raise_for(results)


@app.command("new", short_help="Write a reward function to start from, and a test of it.")
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="my_reward, or my_module.my_reward.")],
    folder: Annotated[str, typer.Option("--dir", metavar="DIR", help="Where the files go: beside your recipe is the right place.")] = ".",
    as_json: JsonOption = False,
) -> None:
    """Write a reward function to start from, NAME.py, and a test of it, test_NAME.py. Nothing is ever overwritten.

    \b
    rloo rewards new my_reward --dir my-task
    pytest my-task/test_my_reward.py
    """
    from rloo_cli.inspect.skeleton import write_skeleton
    from rloo_cli.run.visible import visible

    paths = write_skeleton(name, Path(folder))
    function = name if "." in name else f"{name}.{name}"
    if as_json:
        from rloo_cli.cli.page import print_json

        print_json({"function": function, "files": [str(path) for path in paths]})
        return
    where = "" if folder == "." else f" --code-dir {folder}"
    for path in paths:
        typer.echo(visible(f"written: {path}"))
    typer.echo(visible(f"test it:   pytest {paths[1]}"))
    typer.echo(visible(f"check it:  rloo rewards check {function}{where} --data prompts.jsonl"))
    typer.echo(f"use it:    rewards: [{{function: {function}}}]")


def _raise_for(results: list[CheckedReward]) -> None:
    """Raise for what would stop a run: failures first, then data that a function refuses."""
    failures = [(checked, line) for checked in results for line in checked.failures]
    if failures:
        checked, line = failures[0]
        raise RewardError(f"reward `{checked.name}` fails: {line}")
    refusal = next((checked.refusal for checked in results if checked.refusal), None)
    if refusal is not None:
        raise DataError(refusal)
