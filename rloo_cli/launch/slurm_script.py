"""The batch script of a run under SLURM: what was asked for, checked, and the script that `slurm.sbatch.jinja` makes of it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rloo_cli.errors import RefusedError
from rloo_cli.recipe.accelerate_file import MOST_COUNT
from rloo_cli.recipe.load import LoadedRecipe
from rloo_cli.recipe.schema import Recipe

TEMPLATE = Path(__file__).with_name("slurm.sbatch.jinja")
SERVER_MODE = ("generation.use_vllm=true", "generation.vllm_mode=server")
"""What makes any recipe one that generates with a server."""
MOST_SERVER_NODES = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """What is asked of SLURM, of each node and of the job."""

    nodes: int
    """All of them, servers included."""
    server_nodes: int = 0
    gpus_per_node: int
    """0 = train on the processors."""
    processes_per_node: int
    """That train, on each training node."""
    cpus_per_node: int | None = None
    """None = whole nodes."""
    memory: str = "0"
    """Of a node, as `--mem` has it; 0 = all."""
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    sbatch_arguments: tuple[str, ...] = ()
    """Further lines for `#SBATCH`, such as `--mail-type=END`."""
    venv: str | None = None
    """A virtual environment whose `rloo` it is; None = that of the PATH."""
    setup: tuple[str, ...] = ()
    """Lines of shell before anything else, such as `module load cuda`."""
    signal_seconds: int
    """Before the time limit."""
    max_requeues: int
    """In a row, without a new checkpoint."""
    server_seconds: int
    """For the server to generate its first token."""
    tensor_parallel: int | None = None
    """GPUs that share a copy of the model on the server; None = all of its node."""

    @property
    def training_nodes(self) -> int:
        """Nodes that train: the first ones."""
        return self.nodes - self.server_nodes

    @property
    def num_processes(self) -> int:
        """That train, on all nodes."""
        return self.training_nodes * self.processes_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCommand:
    """What of `rloo train`'s command line the script repeats."""

    recipe: str
    """As it was named."""
    overrides: tuple[str, ...]
    """Of `--set`."""
    options: tuple[str, ...]
    """Further ones, as words of the command line."""
    output_dir: str | None
    """The run folder; None = the recipe's, else one for each job."""
    trust_remote_code: bool


def check_options(options: SlurmOptions) -> None:
    """Raise RefusedError where the numbers do not fit together, or a value would break its line of the script."""
    if options.server_nodes > MOST_SERVER_NODES:
        raise RefusedError(
            f"--server-nodes {options.server_nodes}: a vLLM server runs on one node (--tensor-parallel up to its GPUs). Give 1 or 0."
        )
    if options.training_nodes < 1:
        raise RefusedError(
            f"--nodes {options.nodes} counts the server's node: with --server-nodes {options.server_nodes} none is left to train."
        )
    if options.num_processes > MOST_COUNT:
        raise RefusedError(
            f"--nodes {options.nodes}: {options.num_processes} processes would train, and no run has more than {MOST_COUNT}."
        )
    if options.gpus_per_node and options.processes_per_node > options.gpus_per_node:
        raise RefusedError(f"--processes-per-node {options.processes_per_node}: each needs a GPU, and a node has {options.gpus_per_node}.")
    if options.tensor_parallel is not None and max(1, options.gpus_per_node) % options.tensor_parallel:
        raise RefusedError(
            f"--tensor-parallel {options.tensor_parallel} does not divide the {options.gpus_per_node} GPUs of the server's node."
        )
    for name, value in (*_places(options), ("mem", options.memory)):
        if not re.fullmatch(r"\S+", value):
            raise RefusedError(f"--{name} {value!r}: one word is wanted.")
    if options.time is not None and not re.fullmatch(r"\d[\d:-]*|UNLIMITED|INFINITE", options.time):
        raise RefusedError(f"--time {options.time!r}: SLURM takes minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS, such as 24:00:00 or 2-0.")
    for line in (*options.sbatch_arguments, *options.setup):
        if not line.isprintable():
            raise RefusedError(f"{line!r}: one line is wanted, of visible characters; give the option once for each.")
    for argument in options.sbatch_arguments:
        if not argument.startswith("-"):
            raise RefusedError(f"--sbatch-arg {argument!r}: an option of sbatch is wanted, such as --sbatch-arg=--mail-type=END.")


def script(options: SlurmOptions, train: TrainCommand, loaded: LoadedRecipe, *, command: Sequence[str]) -> str:
    """The batch script.

    Args:
        options: found right by `check_options`.
        train: what is trained.
        loaded: its recipe, under the overrides and as many processes.
        command: the command line that asks for the script, for its head.

    Raises:
        RefusedError: a path or value in it holds a line end or another hidden character.
    """
    import jinja2

    environment = jinja2.Environment(  # noqa: S701 - a shell script, whose values are quoted one by one
        block_start_string="<%",
        block_end_string="%>",
        variable_start_string="<{",
        variable_end_string="}>",
        comment_start_string="<#",
        comment_end_string="#>",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    _refuse_hidden(command, loaded.recipe)
    name = Path(train.recipe).stem
    text = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        o=options,
        title=_title(options, loaded.recipe),
        command=shlex.join(command),
        job_name=job_name(train.recipe),
        places=_places(options),
        path=_path(options),
        run=_run(name, train.output_dir or loaded.recipe.run.output_dir),
        recipe=shlex.quote(train.recipe),
        train=_train_words(train),
        serve=_serve_words(options, loaded.recipe, trust_remote_code=train.trust_remote_code),
    )
    return re.sub(r"\n{3,}", "\n\n", text)


def _refuse_hidden(command: Sequence[str], recipe: Recipe) -> None:
    """Raise RefusedError for line ends and other hidden characters: in a comment of the script they would begin a command."""
    for word in (*command, recipe.model.model_name_or_path, recipe.model.model_revision or "", recipe.run.output_dir or ""):
        if not word.isprintable():
            raise RefusedError(f"{word!r} has characters that no line of a batch script may hold: rename it, or say it in the recipe.")


def job_name(recipe: str) -> str:
    """What the job of a recipe is called, in one word; its output file begins so."""
    return re.sub(r"[^\w.-]+", "-", f"rloo-{Path(recipe).stem}")


def _title(options: SlurmOptions, recipe: Recipe) -> str:
    def counted(number: int) -> str:
        return f"{number} node{'s' if number > 1 else ''}"

    hardware = f"{options.gpus_per_node} GPUs each" if options.gpus_per_node else "on processors"
    who = (
        counted(options.training_nodes)
        if not options.server_nodes
        else f"{counted(options.training_nodes)}, served by {options.server_nodes} more"
    )
    return f"{recipe.model.model_name_or_path} trained on {who}, {hardware}"


def _places(options: SlurmOptions) -> list[tuple[str, str]]:
    """The options of sbatch that say how long and where, as far as they were given."""
    named = ("time", "partition", "account", "qos", "constraint")
    return [(name, value) for name in named if (value := getattr(options, name)) is not None]


def _path(options: SlurmOptions) -> str | None:
    """What goes in front of PATH, in the shell's words."""
    if options.venv is None:
        return None
    folder = f"{options.venv.rstrip('/')}/bin"
    return shlex.quote(folder) if folder.startswith("/") else f'"$PWD"/{shlex.quote(folder)}'


def _run(name: str, folder: str | None) -> str:
    """The run folder in the shell's words."""
    return shlex.quote(folder) if folder is not None else f'{shlex.quote(f"runs/{name}")}-"$SLURM_JOB_ID"'


def _train_words(train: TrainCommand) -> list[str]:
    """Options of `rloo train`, a line each."""
    lines = [f"--set {shlex.quote(override)}" for override in train.overrides]
    return [*lines, *(shlex.quote(option) for option in train.options), *(["--trust-remote-code"] if train.trust_remote_code else [])]


def _serve_words(options: SlurmOptions, recipe: Recipe, *, trust_remote_code: bool) -> list[str]:
    """Options of `rloo vllm-serve`, a line each: the trainer's model, as the trainer samples from it."""
    if not options.server_nodes:
        return []
    model, generation = recipe.model, recipe.generation
    lines = [f"--model {shlex.quote(model.model_name_or_path)}"]
    if model.model_revision is not None:
        lines.append(f"--revision {shlex.quote(model.model_revision)}")
    if options.gpus_per_node:
        lines.append(f"--dtype {'bfloat16' if recipe.training.bf16 else model.dtype}")
        shared = options.tensor_parallel or options.gpus_per_node
        lines.append(f"--tensor-parallel-size {shared}")
        if copies := options.gpus_per_node // shared - 1:
            lines.append(f"--data-parallel-size {copies + 1}")
    elif not recipe.training.bf16:
        lines.append(f"--dtype {model.dtype}")
    if (length := _longest(recipe)) is not None:
        lines.append(f"--max-model-len {length}")
    if generation.vllm_model_impl != "auto":
        lines.append(f"--model-impl {generation.vllm_model_impl}")
    return [*lines, *(["--trust-remote-code"] if trust_remote_code else [])]


def _longest(recipe: Recipe) -> int | None:
    """Tokens of a prompt and its completion together; None where the recipe does not bound both."""
    prompt, completion = recipe.data.max_prompt_length, recipe.generation.max_completion_length
    if recipe.generation.vllm_max_model_length is not None:
        return recipe.generation.vllm_max_model_length
    return None if prompt is None or completion is None else prompt + completion
