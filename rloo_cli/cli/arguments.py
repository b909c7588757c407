"""What several commands take: the recipe, `--set`, `--code-dir`, and `--resume` with or without a value."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import typer

from rloo_cli.cli.completion import complete_recipe
from rloo_cli.errors import RlooError

RESUME_LATEST = "latest"
RESUME_AUTO = "auto"

RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        show_default=False,
        autocompletion=complete_recipe,
        help="A YAML file, or the name of a shipped recipe such as `quickstart`.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a field, by its name or dotted path; the value is YAML. Can be given several times."
    ),
]
CodeDirOption = Annotated[
    str | None,
    typer.Option(
        "--code-dir", metavar="DIR", show_default=False, help="Where reward functions are imported from; default: the recipe's folder."
    ),
]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let the model's folder run code of its own. Never read from a recipe.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors and the last line only.")]


def number_or_auto(text: str) -> str:
    """What `--num-processes` takes, as it was given."""
    if text == "auto" or (text.isascii() and text.isdecimal() and int(text) >= 1):
        return text
    raise typer.BadParameter(f"{text!r:.60} is neither a number from 1 nor auto")


def launch_overrides(num_processes: str | None, accelerate_config: str | None) -> dict[str, str]:
    """The overrides that two options of their own stand for, each with the option as it was given.

    >>> launch_overrides("2", None)
    {'run.num_processes=2': '--num-processes 2'}
    """
    both = {
        f"run.num_processes={num_processes}": ("--num-processes", num_processes),
        f"run.accelerate_config={json.dumps(accelerate_config)}": ("--accelerate-config", accelerate_config),
    }
    return {override: f"{option} {value}" for override, (option, value) in both.items() if value is not None}


@contextlib.contextmanager
def options_named(given: Mapping[str, str]) -> Iterator[None]:
    """Has errors of the block name options as they were given where they name the overrides that those stand for."""
    try:
        yield
    except RlooError as error:
        for override, option in given.items():
            error.message = error.message.replace(f"--set {override}", option)
        raise


SERVE = "vllm-serve"
SERVE_SWITCHES = ("--enable-prefix-caching", "--enforce-eager", "--trust-remote-code")
WORDS_OF_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False, "none": None}


def expand_serve(arguments: Sequence[str]) -> list[str]:
    """The arguments of `vllm-serve` with dashes for underscores in names, and switches without a value; others as they are.

    Scripts written for `trl vllm-serve` say `--tensor_parallel_size 4 --enable_prefix_caching true`.
    """
    if not arguments or arguments[0] != SERVE:
        return list(arguments)
    own = list(arguments[: arguments.index("--")]) if "--" in arguments else list(arguments)
    rest = list(arguments[len(own) :])
    expanded: list[str] = []
    while own:
        name, equals, value = own.pop(0).partition("=")
        if not name.startswith("--"):
            expanded.append(name + equals + value)
            continue
        name = name.replace("_", "-")
        if name not in SERVE_SWITCHES:
            expanded.append(name + equals + value)
        elif equals or (own and own[0].lower() in WORDS_OF_TRUTH):
            expanded += _switch(name, value if equals else own.pop(0))
        else:
            expanded.append(name)
    return [*expanded, *rest]


def _switch(name: str, value: str) -> list[str]:
    """The switch that `--name value` means; one with another value is left for the parser to refuse."""
    wanted = WORDS_OF_TRUTH.get(value.lower(), value)
    if wanted is True:
        return [name]
    if wanted is False:
        return [f"--no-{name[2:]}"] if name == "--enable-prefix-caching" else []
    return [] if wanted is None else [f"{name}={value}"]


def expand_resume(arguments: Sequence[str]) -> list[str]:
    """The arguments with `--resume` given a value where it has none: `latest`.

    typer has no options with an optional value. A value needs `=`, except for a step number, `latest` and `auto`, which cannot be
    mistaken for a recipe: `--resume`, `--resume=PATH`, `--resume=40` and `--resume 40` all work.
    """
    expanded: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return [*expanded, argument, *rest]
        if argument == "--resume":
            has_value = bool(rest) and (rest[0].isdecimal() or rest[0] in (RESUME_LATEST, RESUME_AUTO))
            argument = f"--resume={rest.pop(0) if has_value else RESUME_LATEST}"
        expanded.append(argument)
    return expanded
