"""The command line: `run()` is the console script's entry point, and the edge where every exception becomes an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.exceptions import TyperException

from rloo_cli import __version__
from rloo_cli.cli.arguments import expand_resume, expand_serve
from rloo_cli.cli.doctor import doctor
from rloo_cli.cli.evaluate import evaluate
from rloo_cli.cli.export import export
from rloo_cli.cli.failures import report_bug, report_error
from rloo_cli.cli.generate import generate
from rloo_cli.cli.launch_config import app as launch_config
from rloo_cli.cli.plan import plan
from rloo_cli.cli.recipes import app as recipes
from rloo_cli.cli.report import report
from rloo_cli.cli.rewards import app as rewards
from rloo_cli.cli.rollouts import app as rollouts
from rloo_cli.cli.runs import app as runs
from rloo_cli.cli.schema import schema
from rloo_cli.cli.show import show
from rloo_cli.cli.slurm import slurm, slurm_attempt, slurm_port, slurm_task
from rloo_cli.cli.train import train
from rloo_cli.cli.vllm_serve import vllm_serve
from rloo_cli.errors import RlooError

EPILOG = """\b
Exit codes:
  0 done   1 bug   2 recipe wrong, or refused   3 data   4 reward
  5 engine or server   6 storage   7 non-finite numbers   8 out of memory
  75 stopped by a signal, state saved, `--resume` goes on   130 second Ctrl-C
"""
BROKEN_PIPE = 141  # 128 + SIGPIPE, what a shell reports for a program that the pipe's end stopped
INTERRUPTED = 130

app = typer.Typer(
    name="rloo",
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog=EPILOG)(train)
app.command(epilog=EPILOG)(plan)
app.command(name="eval", epilog=EPILOG)(evaluate)
app.command(epilog=EPILOG)(export)
app.command(epilog=EPILOG)(generate)
app.command(epilog=EPILOG)(report)
app.add_typer(recipes, name="recipes", epilog=EPILOG)
app.command(epilog=EPILOG)(show)
app.command()(schema)
app.command(epilog=EPILOG)(doctor)
app.add_typer(runs, name="runs", epilog=EPILOG)
app.add_typer(rollouts, name="rollouts", epilog=EPILOG)
app.add_typer(rewards, name="rewards", epilog=EPILOG)
app.add_typer(launch_config, name="launch-config", epilog=EPILOG)
app.command(name="vllm-serve", epilog=EPILOG)(vllm_serve)
app.command(epilog=EPILOG)(slurm)
app.command(name="slurm-attempt", hidden=True)(slurm_attempt)
app.command(name="slurm-task", hidden=True)(slurm_task)
app.command(name="slurm-port", hidden=True)(slurm_port)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rloo {__version__}")
        raise typer.Exit


@app.callback(epilog=EPILOG)
def main(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Train language models with RLOO (REINFORCE Leave-One-Out) from YAML recipes.

    \b
    rloo plan  recipes/quickstart.yaml      what a run would do, and whether it fits
    rloo train recipes/quickstart.yaml      do it
    rloo train recipes/quickstart.yaml --resume --output-dir runs/mine
    rloo eval  runs/mine                    score what was trained
    rloo export runs/mine my-model          its best checkpoint as a transformers folder
    rloo generate runs/mine "What is 1+2?"  talk to it
    rloo runs ls                            every run: state, rewards, when
    rloo report runs/mine                   a page about it: curves, health, rollouts
    rloo recipes ls                         the recipes that come with rloo
    rloo show mine.yaml --sources           what a recipe comes to, and why
    rloo schema --show generation           the fields of a recipe's section
    rloo doctor                             what on this machine is in the way
    rloo rewards check recipes/quickstart.yaml   what its reward pays for
    rloo rollouts show runs/mine            completions, rewards, advantages
    rloo vllm-serve --model M               a vLLM server that trainers generate with
    rloo slurm mine.yaml --gpus-per-node 8  the batch script that trains it under SLURM

    `rloo COMMAND --help` tells more.
    """


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (`sys.argv` by default) and exit with its code."""
    # Read by OpenMP when torch is loaded. Its threads spin for milliseconds at every barrier by default, which halves the speed as soon
    # as a reward worker wants a core.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    sys.exit(exit_code_of(sys.argv[1:] if arguments is None else arguments))


def exit_code_of(arguments: Sequence[str]) -> int:
    """The exit code of a command line; one line on standard error if it failed, never a traceback."""
    try:
        code = app(expand_resume(expand_serve(arguments)), standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except TyperException as error:
        return _report_usage(error)
    except RlooError as error:
        report_error(error)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("interrupted", err=True)
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _stdout_is_gone():
            return BROKEN_PIPE
        report_bug(error)
        return 1


def _report_usage(error: TyperException) -> int:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "rloo"
    message = error.format_message()
    if not message.strip():  # no arguments at all: the help is the answer
        typer.echo(context.get_help() if context is not None else "rloo --help", err=True)
    elif message.lstrip().startswith("Usage:"):
        typer.echo(message, err=True)
    else:
        typer.echo(f"error: {message} `{path} --help` lists what there is.", err=True)
    return 2


def _stdout_is_gone() -> bool:
    """Whether whoever read our output has left; if so, what is still buffered goes nowhere."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False
