"""`rloo rollouts`: look at what the model wrote and what it got for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rloo_cli.cli.completion import complete_run
from rloo_cli.errors import RefusedError, RewardError, RlooError, StorageError

if TYPE_CHECKING:
    from rloo_cli.inspect.rollout_files import RolloutFile
    from rloo_cli.inspect.step_summary import StepSummary

app = typer.Typer(
    help="""Look at what the model wrote and what it got for it: every completion of a run is kept.

    \b
    rloo rollouts ls runs/mine                   which steps there are
    rloo rollouts stats runs/mine                rewards and lengths by step
    rloo rollouts show runs/mine --worst         a group: texts, rewards, advantages
    rloo rollouts diff runs/mine eval-0 eval     the same prompts before and after
    rloo rollouts rescore runs/mine -r my.score  another reward, the same texts

    A STEP is a number, `eval-40`, `failed-12`, `first`, `last`, `eval` or `failed` (the last of them); `5-20` where several are taken.
    All of it needs neither the model nor a GPU. `--json` is for machines.
    """,
    no_args_is_help=True,
    rich_markup_mode=None,
)

RunArgument = Annotated[
    str,
    typer.Argument(metavar="RUN", show_default=False, autocompletion=complete_run, help="A run folder, or one rollout file (.parquet)."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
FullOption = Annotated[bool, typer.Option("--full", help="Show long texts whole.")]
StepsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--step", "-s", metavar="STEP", show_default=False, help="Only these steps: 12, 5-20, eval-40, last. Can be given several times."
    ),
]


@app.command("ls", short_help="List the steps of a run.")
def list_rollouts(run: RunArgument, steps: StepsOption = None, as_json: JsonOption = False) -> None:
    """List the steps of a run: prompts, completions, mean reward, tokens, how completions ended.

    \b
    rloo rollouts ls runs/mine
    rloo rollouts ls runs/mine | tail -3
    """
    from rloo_cli.cli.rollouts_view import list_rows

    summaries, damaged = _summaries(run, steps)
    if as_json:
        _print_summaries_json(summaries)
    else:
        header, rows = list_rows(summaries)
        _print_rows(header, rows, summaries, left=("step", "ended"))
    _raise_first(damaged)


@app.command("stats", short_help="Tabulate rewards and lengths by step.")
def show_stats(run: RunArgument, steps: StepsOption = None, as_json: JsonOption = False) -> None:
    """Tabulate each step: reward (mean, deviation, deviation within groups), tokens, share cut off, groups without signal, each function.

    A group without signal has equal rewards only: its completions teach nothing. When most groups are like that, the prompts are too easy
    or too hard, or the reward is too coarse. Lengths that climb while the reward does may mean that the reward pays for length.

    \b
    rloo rollouts stats runs/mine
    rloo rollouts stats runs/mine --step 1-10 --step eval
    """
    from rloo_cli.cli.page import new_console, print_page
    from rloo_cli.cli.rollouts_view import STATS_HEADER, course, stats_rows, without_repetition

    summaries, damaged = _summaries(run, steps)
    if as_json:
        _print_summaries_json(summaries)
    else:
        console = new_console()
        header, rows = stats_rows(summaries)
        if console.is_terminal:
            header, rows = without_repetition(header, rows)
        _print_rows(header, rows, summaries, own=len(STATS_HEADER))
        line = course(summaries)
        if console.is_terminal and line is not None:
            from rich.text import Text

            print_page(console, [Text(), Text(line)])
    _raise_first(damaged)


@app.command("show", short_help="Show a group: prompt, completions, rewards, advantages.")
def show_groups(
    run: RunArgument,
    step: Annotated[
        str | None, typer.Option("--step", "-s", metavar="STEP", show_default=False, help="Which step; default: the last.")
    ] = None,
    prompt: Annotated[int | None, typer.Option("--prompt", "-p", metavar="ROW", show_default=False, help="The prompt in this row.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The group with the highest mean reward.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="The group with the lowest mean reward.")] = False,
    containing: Annotated[
        str | None, typer.Option("--contains", metavar="TEXT", show_default=False, help="Groups in which a completion holds this text.")
    ] = None,
    ended: Annotated[
        str | None,
        typer.Option("--ended", metavar="REASON", show_default=False, help="Groups in which a completion ended so: truncated, stopped, …"),
    ] = None,
    count: Annotated[int, typer.Option("-n", min=1, metavar="N", help="How many groups.")] = 1,
    special: Annotated[bool, typer.Option("--special", help="Show special tokens, and the prompt as the model saw it.")] = False,
    full: FullOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show a group: the prompt, and each completion with its reward by function, advantage, length and how it ended.

    \b
    rloo rollouts show runs/mine                   the last step's first group
    rloo rollouts show runs/mine --step 12 --worst -n 3
    rloo rollouts show runs/mine --step eval --prompt 7 --special
    rloo rollouts show runs/mine --contains '</think>' --full | less -R
    rloo rollouts show runs/mine --step failed     what a run stopped at
    """
    if best and worst:
        raise typer.BadParameter("one of them at a time.", param_hint="--best, --worst")
    from rloo_cli.cli.page import new_console, print_json, print_page
    from rloo_cli.inspect.pick_groups import pick_groups
    from rloo_cli.inspect.rollout_files import choose_file, find_rollouts
    from rloo_cli.inspect.stored import failure_facts, read_groups
    from rloo_cli.inspect.token_text import tokenizer_of_run

    file = choose_file(find_rollouts(Path(run)), step or "last")
    groups = read_groups(file)
    order = "best" if best else "worst" if worst else None
    chosen = pick_groups(groups, file, prompt_row=prompt, containing=containing, finish_reason=ended, order=order, count=count)
    facts = failure_facts(file)
    if as_json:
        print_json({"file": str(file.path), "step": file.step, "kind": file.kind, "failure": facts or None, "groups": chosen})
        return
    from rich.text import Text

    from rloo_cli.cli.rollouts_view import group_parts
    from rloo_cli.run.visible import visible

    tokens = tokenizer_of_run(file.run) if special else None
    console = new_console()
    if facts.get("message"):
        print_page(console, [Text(visible(f"the run stopped here: {facts['message']}"), style="red")])
    for group in chosen:
        print_page(console, group_parts(console, group, file, len(groups), tokens=tokens, full=full, fault=facts.get("row")))


@app.command("diff", short_help="Compare the same prompts at two steps.")
def diff_steps(
    run: RunArgument,
    step_a: Annotated[str, typer.Argument(metavar="STEP_A", show_default=False, help="12, first, eval-0, …")],
    step_b: Annotated[str, typer.Argument(metavar="STEP_B", show_default=False, help="The step to hold against it.")],
    other: Annotated[
        str | None, typer.Option("--other", metavar="RUN", show_default=False, help="The run that STEP_B is of; default: the same.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Show the prompts that gained most.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Show the prompts that lost most.")] = False,
    count: Annotated[int, typer.Option("-n", min=0, metavar="N", help="How many prompts are shown, those that changed most first.")] = 3,
    full: FullOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare the same prompts at two steps, of one run or of two: rewards, lengths, and the best completion of each side.

    Evaluations have the same prompts every time; training steps meet theirs again an epoch later.

    \b
    rloo rollouts diff runs/mine eval-0 eval              before and after
    rloo rollouts diff runs/mine eval-0 eval --worst      what was unlearnt
    rloo rollouts diff runs/mine 5 5 --other runs/theirs  a step of two runs
    """
    if best and worst:
        raise typer.BadParameter("one of them at a time.", param_hint="--best, --worst")
    from rloo_cli.cli.page import new_console, print_json, print_page
    from rloo_cli.inspect.comparing import nothing_in_common, pair_groups
    from rloo_cli.inspect.rollout_files import choose_file, find_rollouts
    from rloo_cli.inspect.stored import read_groups

    files = find_rollouts(Path(run))
    others = find_rollouts(Path(other)) if other else files
    before, after = choose_file(files, step_a), choose_file(others, step_b)
    pairs = pair_groups(read_groups(before), read_groups(after))
    if not pairs:
        raise nothing_in_common(before, after, others)
    direction = {(True, False): -1, (False, True): 1}.get((best, worst))
    ranked = sorted(pairs, key=lambda pair: -abs(pair.change or 0.0) if direction is None else direction * (pair.change or 0.0))
    if as_json:
        print_json(
            [{"prompt_row": pair.before.prompt_row, "change": pair.change, "before": pair.before, "after": pair.after} for pair in ranked]
        )
        return
    from rloo_cli.cli.comparison_view import diff_parts

    names = (f"step {before.label}", f"step {after.label}" + (f" of {other}" if other else ""))
    console = new_console()
    print_page(console, diff_parts(console, pairs, ranked[:count], names, full=full))


@app.command("rescore", short_help="Run another reward function over stored completions.")
def rescore(
    run: RunArgument,
    reward: Annotated[
        str, typer.Option("--reward", "-r", metavar="SPEC", show_default=False, help="The function: a built-in's name, or module.function.")
    ],
    kwargs: Annotated[
        str | None, typer.Option("--kwargs", metavar="YAML", show_default=False, help="Its arguments, such as '{limit: 200}'.")
    ] = None,
    steps: StepsOption = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", metavar="NAME", show_default=False, help="Compare with this function's rewards; default: their weighted sum."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data", metavar="FILE", show_default=False, help="Where the columns that it needs are; default: the run's data set."
        ),
    ] = None,
    no_data: Annotated[bool, typer.Option("--no-data", help="Read no data: the function needs prompts and completions alone.")] = False,
    code_dir: Annotated[
        str | None,
        typer.Option("--code-dir", metavar="DIR", show_default=False, help="Where it is imported from; default: as in the run."),
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", min=0.01, metavar="SECONDS", help="What a completion may take.")] = 30.0,
    count: Annotated[int, typer.Option("-n", min=0, metavar="N", help="How many examples are shown.")] = 3,
    full: FullOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run another reward function over stored completions, without a model, and hold its rewards against those that they got.

    `advantages` counts what would have become of each completion's direction: same, flipped, gained (it had none), lost. A function that
    flips few signs would have trained much the same model.

    \b
    rloo rollouts rescore runs/mine --reward my_rewards.strict
    rloo rollouts rescore runs/mine -r regex_reward --kwargs '{pattern: "42"}'
    rloo rollouts rescore runs/mine -r my_rewards.length --against correct_answer
    """
    from rloo_cli.cli.page import new_console, print_json, print_page
    from rloo_cli.cli.rescoring import rescore_files
    from rloo_cli.inspect.rescoring import agreement, examples
    from rloo_cli.inspect.rollout_files import choose_files, find_rollouts

    files = find_rollouts(Path(run))
    chosen = choose_files(files, steps) if steps else [file for file in files if file.kind == "train"] or files
    rescored = rescore_files(
        chosen, reward=reward, kwargs=kwargs, against=against, dataset=data, reads_data=not no_data, code_dir=code_dir, timeout=timeout
    )
    every = [group for groups in rescored.values() for group in groups]
    total, by_step = agreement(every), {label: agreement(groups) for label, groups in rescored.items()}
    found = examples(every, count)
    if as_json:
        print_json({"reward": reward, "against": against or "reward", "total": total, "steps": by_step, "examples": found})
    else:
        from rloo_cli.cli.comparison_view import rescore_parts

        console = new_console()
        print_page(console, rescore_parts(console, total, by_step, found, new=reward, old=against or "reward", full=full))
    if total.failed:
        line = next(reason for group in every for reason in group.failures.values())
        raise RewardError(f"reward `{reward}` failed on {total.failed} of {total.completions} completions, at first: {line}")


def _summaries(run: str, steps: list[str] | None) -> tuple[list[StepSummary], dict[RolloutFile, RlooError]]:
    """A summary of each file that was asked for, and the errors of those that cannot be read."""
    from rloo_cli.inspect.rollout_files import choose_files, find_rollouts
    from rloo_cli.inspect.step_summary import summarize

    files: list[RolloutFile] = find_rollouts(Path(run))
    summaries: list[StepSummary] = []
    damaged: dict[RolloutFile, RlooError] = {}
    for file in choose_files(files, steps) if steps else files:
        try:
            summaries.append(summarize(file))
        except StorageError as error:
            damaged[file] = error
        except RefusedError as error:  # a foreign file; where it is the one that was named, nothing is shown
            if len(files) == 1:
                raise
            damaged[file] = error
    return summaries, damaged


def _raise_first(errors: Mapping[RolloutFile, RlooError]) -> None:
    if errors:
        others = ", ".join(file.path.name for file in list(errors)[1:])
        rest = f" Not readable either: {others}." if others else ""
        raise StorageError(f"{next(iter(errors.values())).message} The other steps are shown.{rest}")


def _print_summaries_json(summaries: Sequence[StepSummary]) -> None:
    from rloo_cli.cli.page import print_json

    print_json(summaries)


def _print_rows(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    summaries: Sequence[StepSummary],
    *,
    left: Sequence[str] = ("step",),
    own: int = 1000,
) -> None:
    """A table on a terminal, tab-separated lines in a pipe."""
    import sys

    from rloo_cli.cli.page import fitting_tables, new_console, print_page
    from rloo_cli.cli.rollouts_view import row_styles
    from rloo_cli.cli.tables import print_table

    if not sys.stdout.isatty():
        print_table(rows, header=header)
        return
    console = new_console()
    print_page(console, fitting_tables(console, header, rows, left=left, own=own, styles=row_styles(summaries)))
