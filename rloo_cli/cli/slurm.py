"""`rloo slurm`: the batch script of a run, printed or submitted; and the commands that such a script calls."""

from __future__ import annotations

import os
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from rloo_cli.cli.arguments import CodeDirOption, RecipeArgument, SetOption, TrustOption, launch_overrides, options_named
from rloo_cli.errors import RefusedError

SEPARATOR = ":::"


def slurm(
    recipe: RecipeArgument,
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", min=0, show_default=False, help="0 trains on the processors.")],
    nodes: Annotated[int, typer.Option("--nodes", "-N", min=1, help="All of them, the server's included.")] = 1,
    server_nodes: Annotated[int, typer.Option("--server-nodes", min=0, help="How many of them serve with vLLM: 0 or 1.")] = 0,
    overrides: SetOption = None,
    accelerate_config: Annotated[
        str | None,
        typer.Option(
            "--accelerate-config", metavar="NAME", show_default=False, help="As in `rloo train`: ddp, fsdp2, zero2, zero3, a file."
        ),
    ] = None,
    output_dir: Annotated[
        str | None,
        typer.Option(
            "--output-dir", "-o", metavar="DIR", show_default="runs/RECIPE-JOBID", help="Run folder, on a file system of all nodes."
        ),
    ] = None,
    processes_per_node: Annotated[
        int | None,
        typer.Option("--processes-per-node", min=1, show_default="a GPU each, else 1", help="That train, on each training node."),
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option("--tensor-parallel", min=1, show_default="all of the node", help="GPUs of the server that share a copy of the model."),
    ] = None,
    cpus_per_node: Annotated[
        int | None, typer.Option("--cpus-per-node", min=1, show_default="whole nodes", help="Cores of each node.")
    ] = None,
    memory: Annotated[str, typer.Option("--mem", show_default="all", help="Memory of each node, such as 200G.")] = "0",
    limit: Annotated[str | None, typer.Option("--time", show_default="the partition's", help="Time limit, such as 24:00:00.")] = None,
    partition: Annotated[str | None, typer.Option("--partition", "-p", show_default=False)] = None,
    account: Annotated[str | None, typer.Option("--account", "-A", show_default=False)] = None,
    qos: Annotated[str | None, typer.Option("--qos", show_default=False)] = None,
    constraint: Annotated[str | None, typer.Option("--constraint", "-C", show_default=False)] = None,
    sbatch_arguments: Annotated[
        list[str] | None, typer.Option("--sbatch-arg", metavar="OPTION", show_default=False, help="A further line for #SBATCH.")
    ] = None,
    venv: Annotated[
        str | None, typer.Option("--venv", metavar="DIR", show_default="this one", help="Virtual environment, seen by all nodes.")
    ] = None,
    setup: Annotated[
        list[str] | None, typer.Option("--setup", metavar="LINE", show_default=False, help="Shell before all else: 'module load cuda'.")
    ] = None,
    signal_seconds: Annotated[
        int, typer.Option("--signal-seconds", min=60, help="Before the time limit, to save: a checkpoint has to be written in less.")
    ] = 120,
    max_requeues: Annotated[int, typer.Option("--max-requeues", min=0, help="In a row, without a new checkpoint; then the job ends.")] = 3,
    server_seconds: Annotated[int, typer.Option("--server-seconds", min=1, help="For the server's first token.")] = 3600,
    code_dir: CodeDirOption = None,
    trust_remote_code: TrustOption = False,
    does_print: Annotated[bool, typer.Option("--print", help="Print the script; so it is without --submit.")] = False,
    does_submit: Annotated[bool, typer.Option("--submit", help="Submit it, and print the job's id.")] = False,
) -> None:
    """Write the batch script that trains a recipe under SLURM, on one node or many, with a vLLM server on one of them or without.

    \b
    rloo slurm mine.yaml --gpus-per-node 8 > mine.sbatch                       one node
    rloo slurm mine.yaml --nodes 4 --gpus-per-node 8 --time 24:00:00 --submit  four that train
    rloo slurm mine.yaml --nodes 5 --server-nodes 1 --gpus-per-node 8          four that train, one that serves
    rloo slurm mine.yaml --nodes 2 --gpus-per-node 4 --cpus-per-node 32 --mem 200G --partition gpu --setup 'module load cuda'

    The job saves before its time limit and before pre-emption, is requeued, and goes on from there; its exit code is that of `rloo train`.
    The recipe is checked here as it will run there. docs/slurm.md explains the script and what happens when something fails.
    """
    from rloo_cli.launch.slurm_job import refuse_broken_setup, submit
    from rloo_cli.launch.slurm_script import SERVER_MODE, SlurmOptions, TrainCommand, check_options, job_name, script
    from rloo_cli.plan.prepare import check_recipe

    if does_print and does_submit:
        raise RefusedError("--print and --submit: one of them.")
    options = SlurmOptions(
        nodes=nodes,
        server_nodes=server_nodes,
        gpus_per_node=gpus_per_node,
        processes_per_node=processes_per_node or gpus_per_node or 1,
        cpus_per_node=cpus_per_node,
        memory=memory,
        time=limit,
        partition=partition,
        account=account,
        qos=qos,
        constraint=constraint,
        sbatch_arguments=tuple(sbatch_arguments or ()),
        venv=venv if venv is not None else _own_venv(),
        setup=tuple(setup or ()),
        signal_seconds=signal_seconds,
        max_requeues=max_requeues,
        server_seconds=server_seconds,
        tensor_parallel=tensor_parallel,
    )
    check_options(options)
    refuse_broken_setup(options.setup)
    settings = [*(overrides or []), *(SERVER_MODE if server_nodes else ())]
    layout = launch_overrides(None, accelerate_config)
    with options_named(layout):
        loaded = check_recipe(
            recipe,
            overrides=[*settings, *layout],
            code_dir=code_dir,
            num_processes=options.num_processes,
            num_machines=options.training_nodes,
            is_training=True,
        ).loaded
    train = TrainCommand(
        recipe=recipe,
        overrides=tuple(settings),
        options=(
            *([f"--code-dir={code_dir}"] if code_dir is not None else []),
            *([f"--accelerate-config={accelerate_config}"] if accelerate_config is not None else []),
        ),
        output_dir=output_dir,
        trust_remote_code=trust_remote_code,
    )
    text = script(options, train, loaded, command=["rloo", *[word for word in sys.argv[1:] if word not in ("--print", "--submit")]])
    if not does_submit:
        typer.echo(text, nl=False)
        return
    job = submit(text)
    typer.echo(f"job {job}\n  squeue --job {job}\n  tail -F {job_name(recipe)}-{job}.out\n  scancel {job}")


def slurm_port(number: Annotated[int, typer.Argument(min=1)] = 1) -> None:
    """Print the NUMBER-th free port of this node, in an order that SLURM_JOB_ID decides. For the scripts that `rloo slurm` writes."""
    from rloo_cli.launch.slurm_job import job_of
    from rloo_cli.launch.slurm_port import free_port

    typer.echo(str(free_port(number, job=int(job_of(os.environ).id))))


def slurm_task(
    logs: Annotated[str, typer.Argument(metavar="FOLDER", show_default=False)],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", show_default=False)],
) -> None:
    """Run another command of rloo as the task of a step, and leave its exit code in FOLDER. For the scripts that `rloo slurm` writes."""
    from rloo_cli.cli.app import exit_code_of
    from rloo_cli.launch.slurm_records import TaskRecord, write_record

    node = os.environ.get("SLURM_NODEID", "")
    if not node.isdecimal():
        raise RefusedError("SLURM_NODEID is not set: this command is for the tasks of a SLURM step.")
    code = exit_code_of(command)
    write_record(Path(logs), TaskRecord(node=int(node), host=os.environ.get("SLURMD_NODENAME", "?"), exit_code=code, time=time.time()))
    raise typer.Exit(code)


def slurm_attempt(
    run: Annotated[str, typer.Option("--run", show_default=False)],
    logs: Annotated[str, typer.Option("--logs", show_default=False)],
    commands: Annotated[list[str], typer.Argument(metavar="-- [SERVER… :::] TRAINING…", show_default=False)],
    tasks: Annotated[int, typer.Option("--tasks", min=1, show_default=False)],
    signal_seconds: Annotated[float, typer.Option("--signal-seconds", min=1)] = 120.0,
    max_requeues: Annotated[int, typer.Option("--max-requeues", min=0)] = 3,
    server_url: Annotated[str | None, typer.Option("--server-url", show_default=False)] = None,
    server_key: Annotated[str | None, typer.Option("--server-key", show_default=False)] = None,
    server_seconds: Annotated[float, typer.Option("--server-seconds", min=1)] = 3600.0,
) -> None:
    """Start the steps of a job, see them to their end, and requeue the job where it can go on. For the scripts that `rloo slurm` writes."""
    from rloo_cli.launch.slurm_attempt import Attempt, Server, run_attempt
    from rloo_cli.launch.slurm_job import job_of

    job = job_of(os.environ)
    server = None
    if SEPARATOR in commands:
        cut = commands.index(SEPARATOR)
        if server_url is None or server_key is None:
            raise RefusedError("a server's step needs --server-url and --server-key.")
        server = Server(command=tuple(commands[:cut]), url=server_url, key=Path(server_key), seconds=server_seconds)
        commands = commands[cut + 1 :]
    attempt = Attempt(
        run=Path(run),
        logs=Path(logs),
        training=tuple(commands),
        tasks=tasks,
        server=server,
        signal_seconds=signal_seconds,
        max_requeues=max_requeues,
    )
    raise typer.Exit(run_attempt(attempt, job, _say))


def _say(line: str) -> None:
    typer.echo(f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S} {line}", err=True)


def _own_venv() -> str | None:
    return sys.prefix if sys.prefix != sys.base_prefix else None
