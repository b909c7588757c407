"""The command line: `run()` is the console script's entry point, and the edge where every exception becomes an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from rloo_cli import __version__
from rloo_cli.cli.arguments import expand_resume, expand_serve
from rloo_cli.cli.doctor import doctor
from rloo_cli.cli.evaluate import evaluate
from rloo_cli.cli.export import export
from rloo_cli.cli.failures import report_bug, report_error
from rloo_cli.cli.generate import generate
from rloo_cli.cli.import_trl import import_trl
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
    0  done                        6  storage
    1  a fault in rloo itself      7  numbers that are not finite
    2  recipe wrong, or refused    8  out of memory
    3  data                       75  stopped by a signal and saved: --resume
    4  reward function           130  second Ctrl-C
    5  engine or server
"""
LINES = {
    "recipes": "List, print and copy the recipes that come with rloo.",
    "show": "Print what a recipe comes to, and where each value is from.",
    "schema": "Print the JSON Schema of a recipe, or a section's fields.",
    "rewards": "List reward functions, try one, start a new one.",
    "doctor": "Look for what on this machine is in the way of a run.",
    "plan": "Check a recipe: batches, steps, memory, first prompt.",
    "train": "Train a model from a recipe, or go on after a stop.",
    "eval": "Score a run's model, or any other, on the test split.",
    "generate": "Talk to what was trained, as training did.",
    "export": "Write a checkpoint as a transformers folder.",
    "runs": "List runs, show one on a page, compare several.",
    "report": "Write an HTML page about a run: curves, health, texts.",
    "rollouts": "Look at completions with their rewards and advantages.",
    "import-trl": "Write a recipe from a script for TRL's RLOOTrainer.",
    "launch-config": "List and print what --accelerate-config takes.",
    "slurm": "Write the batch script that trains a recipe under SLURM.",
    "vllm-serve": "Serve a model by vLLM for trainers to generate with.",
}
"""What `rloo --help` says of each command on one line of 80 columns, in its order: before a run, the run, after it, other machines."""
BROKEN_PIPE = 141  # 128 + SIGPIPE, what a shell reports for a program that the pipe's end stopped
INTERRUPTED = 130


class _InOrder(TyperGroup):
    """Commands in the order of `LINES`, not as they were registered."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Those with a line; the others are hidden."""
        return [name for name in LINES if name in self.commands]


app = typer.Typer(
    name="rloo",
    cls=_InOrder,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS: Mapping[str, Callable[..., Any]] = {
    "show": show,
    "schema": schema,
    "doctor": doctor,
    "plan": plan,
    "train": train,
    "eval": evaluate,
    "generate": generate,
    "export": export,
    "report": report,
    "import-trl": import_trl,
    "slurm": slurm,
    "vllm-serve": vllm_serve,
}
GROUPS = {"recipes": recipes, "rewards": rewards, "runs": runs, "rollouts": rollouts, "launch-config": launch_config}
for _name, _command in COMMANDS.items():
    app.command(name=_name, epilog=EPILOG, short_help=LINES[_name])(_command)
for _name, _group in GROUPS.items():
    app.add_typer(_group, name=_name, epilog=EPILOG, short_help=LINES[_name])
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
    rloo train quickstart --output-dir runs/mine   one to two minutes on a CPU
    rloo report runs/mine                          curves, health, completions
    rloo generate runs/mine "What is 47+38+85?"    talk to it
    rloo recipes cp template my-task               begin a recipe of your own
    rloo plan my-task/recipe.yaml                  would it fit this machine?

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
        stop = "" if message.rstrip().endswith((".", "?", "!")) else "."
        typer.echo(f"error: {message.rstrip()}{stop} `{path} --help` lists what there is.", err=True)
    return 2


def _stdout_is_gone() -> bool:
    """Whether whoever read our output has left; if so, what is still buffered goes nowhere."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False
