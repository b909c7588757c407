"""`rloo generate`: talk to what was just trained."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rloo_cli.cli.arguments import TrustOption
from rloo_cli.cli.completion import complete_recipe_or_run
from rloo_cli.errors import DataError, RefusedError, RlooError, StorageError

if TYPE_CHECKING:
    from rloo_cli.launch.talk import Answer, Speaker, Subject
    from rloo_cli.rollout.engine import SamplingParams
    from rloo_cli.types import PromptContent

STDIN = "-"
LARGEST_FILE = 1 << 26


def generate(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT|MODEL",
            show_default=False,
            autocompletion=complete_recipe_or_run,
            help="A run folder (its final model, else its latest checkpoint), a checkpoint's folder, a model's folder or hub id, or a recipe "
            "(its model before training).",
        ),
    ],
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]…", show_default=False, help="What to complete; `-` reads one from standard input."),
    ] = None,
    count: Annotated[int, typer.Option("-n", min=1, metavar="N", help="Completions of each prompt.")] = 1,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0, metavar="T", show_default=False, help="0 = greedy; default: as in the run.")
    ] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", max=1, metavar="P", show_default=False, help="Default: as in the run.")] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", min=1, metavar="N", show_default=False, help="Default: max_completion_length of the run."),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option("--system", metavar="TEXT", show_default=False, help="System prompt; default: the run's. An empty one is none."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Give prompts to the model as they are, without its chat template.")] = False,
    file: Annotated[
        str | None,
        typer.Option("--file", "-f", metavar="FILE", show_default=False, help="Prompts, one a line; or .jsonl with a `prompt` a line."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, metavar="N", help="The same seed draws the same completions.")] = 0,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", metavar="STEP", show_default=False, help="Of a run: this step's, or `latest`.")
    ] = None,
    interactive: Annotated[bool, typer.Option("--interactive", "-i", help="Ask for prompts, one after the other.")] = False,
    special: Annotated[bool, typer.Option("--special", help="Show special tokens, and the prompt as the model saw it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Complete prompts with what was trained, as training would: the run's chat template, system prompt and sampling.

    \b
    rloo generate runs/mine "What is 12+30?"
    rloo generate runs/mine "What is 12+30?" -n 4 --temperature 0.7
    rloo generate runs/mine --interactive
    rloo generate runs/mine --checkpoint 40 --file prompts.txt --json
    rloo generate quickstart "What is 12+30?"        before training
    rloo generate Qwen/Qwen2.5-0.5B-Instruct "Hi" --max-new-tokens 64

    Each prompt stands alone, as in training: with --interactive, too, nothing is remembered. It runs on the GPU where there is one.
    """
    if raw and system:
        raise typer.BadParameter("a raw prompt has no system prompt; write it into the prompt.", param_hint="--raw, --system")
    _refuse_unclear(prompts, file, interactive=interactive, as_json=as_json)
    from rloo_cli.launch.local import waiting
    from rloo_cli.launch.talk import Speaker, choose_subject, with_options

    wanted = [] if interactive else [*_typed(prompts or []), *(_read_file(Path(file)) if file is not None else [])]
    chosen = choose_subject(subject, checkpoint=checkpoint)
    with waiting(f"loading {chosen.words}"):
        speaker = Speaker(chosen, seed=seed, trust_remote_code=trust_remote_code)
    params = with_options(speaker.params(), temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens)
    writer = _Writer(chosen, speaker, system=system, is_raw=raw)
    if interactive:
        _talk(writer, params, count, special=special)
        return
    with waiting("generating"):
        answers = speaker.answer([writer.content(prompt) for prompt in wanted], params, count)
    if as_json:
        from rloo_cli.cli.page import print_json

        print_json({"subject": chosen.words, "seed": seed, "sampling": params, "answers": answers})
    else:
        _print_answers(answers, special=special)


def _refuse_unclear(prompts: list[str] | None, file: str | None, *, interactive: bool, as_json: bool) -> None:
    if interactive and (prompts or file is not None or as_json):
        raise typer.BadParameter("it asks for prompts itself, and answers on the terminal.", param_hint="--interactive")
    if interactive and not sys.stdin.isatty():
        raise RefusedError("--interactive needs a terminal: give prompts as arguments, by --file, or `-` for standard input.")
    if not (interactive or prompts or file is not None):
        raise typer.BadParameter("give a prompt, --file or --interactive.", param_hint="PROMPT")


class _Writer:
    """Makes of what was typed what the model is asked: a conversation as the run had them, or plain text."""

    def __init__(self, subject: Subject, speaker: Speaker, *, system: str | None, is_raw: bool) -> None:
        own = subject.recipe.data.system_prompt if subject.recipe is not None else None
        self.system = (own if system is None else system) or None
        self.is_chat = not is_raw and speaker.has_template and (self.system is not None or not _learnt_from_text(subject))
        self.speaker = speaker
        if self.system is not None and not self.is_chat and not is_raw:
            raise RefusedError("the model has no chat template, which a system prompt needs: give --raw, or `--system ''`.")

    def content(self, prompt: Any) -> PromptContent:
        """What to ask for a line of text, or for a row's list of messages."""
        from rloo_cli.data.content import prompt_content

        if isinstance(prompt, str) and self.is_chat:
            prompt = [{"role": "user", "content": prompt}]
        try:
            return prompt_content(prompt, self.system if isinstance(prompt, list) else None)
        except ValueError as error:
            raise DataError(f"a prompt {error}.") from error


def _learnt_from_text(subject: Subject) -> bool:
    """Whether the run's prompts were plain strings, as its rollouts show; a run without any had conversations, as most have."""
    from rloo_cli.inspect.rollout_files import find_rollouts
    from rloo_cli.inspect.stored import read_table

    if subject.run is None:
        return False
    try:
        table = read_table(find_rollouts(subject.run.path)[-1], ["prompt"])
        return table.num_rows > 0 and isinstance(json.loads(table.column("prompt")[0].as_py()), str)
    except (RlooError, KeyError, ValueError, TypeError):
        return False


def _typed(prompts: list[str]) -> Iterator[str]:
    for prompt in prompts:
        text = sys.stdin.read() if prompt == STDIN else prompt
        if not text.strip():
            raise typer.BadParameter("a prompt is empty.", param_hint="PROMPT")
        yield text.rstrip("\n") if prompt == STDIN else text


def _read_file(path: Path) -> list[Any]:
    """The prompts of a file: lines of text, or a `prompt` in each line of a .jsonl.

    Raises:
        StorageError: it cannot be read.
        DataError: it holds none, or a line is not as it should be.
    """
    try:
        if path.is_file() and path.stat().st_size > LARGEST_FILE:
            raise DataError(f"{path}: more than {LARGEST_FILE >> 20} MiB of prompts; cut it, or use `rloo eval`.")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8 text'}).") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise DataError(f"{path} holds no prompts.")
    return (
        [_prompt_of(line, f"{path}:{number}") for number, line in numbered] if path.suffix == ".jsonl" else [line for _, line in numbered]
    )


def _prompt_of(line: str, place: str) -> Any:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f'{place}: expected {{"prompt": …}}, a string or a list of messages.') from error
    if not isinstance(prompt, str | list) or not prompt:
        raise DataError(f"{place}: `prompt` is neither a text nor a list of messages.")
    return prompt


def _talk(writer: _Writer, params: SamplingParams, count: int, *, special: bool) -> None:
    """Ask for prompts until the end of the input."""
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - lets `input` edit its line

    typer.echo("Each prompt stands alone. Ctrl-D or an empty line ends; Ctrl-C abandons an answer.", err=True)
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            typer.echo(err=True)
            return
        if not line.strip():
            return
        try:
            _print_answers(writer.speaker.answer([writer.content(line)], params, count), special=special, with_prompt=False)
        except KeyboardInterrupt:
            typer.echo("abandoned", err=True)
        except RlooError as error:  # the next prompt may be a better one
            from rloo_cli.cli.failures import report_error

            report_error(error)


def _print_answers(answers: list[Answer], *, special: bool, with_prompt: bool = True) -> None:
    """Texts with a line about each; a single completion in a pipe is its text alone."""
    from rich.text import Text

    from rloo_cli.cli.page import echo, new_console, print_page, text_block
    from rloo_cli.run.visible import visible

    if not sys.stdout.isatty() and not special and len(answers) == len(answers[0].completions) == 1:
        echo(visible(answers[0].completions[0].text) + "\n")
        return
    console = new_console()
    for answer in answers:
        if special or (with_prompt and len(answers) > 1):
            text = answer.prompt_text if special or isinstance(answer.prompt, str) else str(answer.prompt[-1].get("content"))
            print_page(console, [Text("prompt", style="bold"), text_block(console, text, full=True, special=special)])
        for number, written in enumerate(answer.completions, 1):
            head = Text(f"#{number}", style="bold").append(f"  {written.tokens} tokens  {written.finish_reason}", style="not bold dim")
            text = written.text_with_special if special else written.text
            print_page(console, [head, text_block(console, text, full=True, special=special)])
        if answer is not answers[-1]:
            print_page(console, [Text()])
