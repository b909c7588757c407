"""The scripts of `rloo slurm` on a real SLURM: a cluster of fake nodes on this machine, which train on its processors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster, why_not

ROOT = Path(__file__).resolve().parents[2]
REASON = why_not()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.timeout(1200)]

RECIPE = """\
extends: {shipped}

rewards:
  - function: gate.letters
"""
GATE = '''\
"""A reward that waits in its third step until somebody opens the gate, or fails there."""

import time
from pathlib import Path

HERE = Path(__file__).parent


def letters(completions, **kwargs):
    while any(HERE.glob("runs/*/checkpoints/000002")) and not (HERE / "open").exists():
        time.sleep(0.1)
    if (HERE / "fail").exists():
        raise ValueError("told to fail")
    texts = [said if isinstance(said, str) else said[-1]["content"] for said in completions]
    return [sum(letter.isalpha() for letter in text) / (1 + len(text)) for text in texts]
'''
STEPS = 5
FEW = ("--set", f"max_steps={STEPS}", "--set", "save_steps=1", "--set", "eval_strategy=no")
VLLM = (
    "--set",
    "eval_on_start=false",
    "--set",
    "generation.max_completion_length=8",
    "--set",
    "prompts_per_step=2",
    "--set",
    "num_generations=4",
)


@pytest.fixture
def cluster(tmp_path):
    def start(nodes, **options):
        return Cluster(tmp_path / "cluster", nodes=nodes, **options)

    return start


class Task:
    """A working folder with a recipe of its own, and the job that was submitted from it."""

    def __init__(self, cluster, folder, *options, shipped="smoke", is_open=True, sbatch=()):
        self.cluster = cluster
        self.folder = folder / "a folder"
        self.folder.mkdir(parents=True)
        (self.folder / "mine.yaml").write_text(RECIPE.format(shipped=ROOT / "recipes" / f"{shipped}.yaml"))
        (self.folder / "gate.py").write_text(GATE)
        if is_open:
            self.open()
        command = [sys.executable, "-m", "rloo_cli", "slurm", "mine.yaml", "--gpus-per-node", "0", *FEW, *options]
        script = subprocess.run(command, cwd=self.folder, capture_output=True, text=True)
        assert script.returncode == 0, script.stderr
        self.job = cluster.submit(script.stdout, *sbatch, cwd=self.folder)

    def open(self):
        (self.folder / "open").touch()

    @property
    def run(self):
        return self.folder / "runs" / f"mine-{self.job}"

    @property
    def output(self):
        file = self.folder / f"rloo-mine-{self.job}.out"
        return file.read_text() if file.exists() else ""

    @property
    def left(self):
        """The job's folder beside the run."""
        return self.folder / "runs" / f"mine-{self.job}.slurm" / f"job-{self.job}"

    def is_held(self):
        """Whether the third step waits at the gate."""
        assert self.cluster.job(self.job)["JobState"] in ("PENDING", "RUNNING"), self.output
        return (self.run / "checkpoints" / "000002").is_dir()

    def wait_until_held(self):
        self.cluster.wait_for("the second step", self.is_held, seconds=400)

    def wait_for_attempt(self, number):
        self.cluster.wait_for(f"attempt {number}", lambda: f"attempt {number} of job" in self.output, seconds=120)

    def end(self, seconds=300):
        """(state, exit code, restarts) at the end of the job."""
        job = self.cluster.wait_for_end(self.job, seconds=seconds)
        print(self.output)
        return job["JobState"], job["ExitCode"].split(":")[0], job["Restarts"]

    def metrics(self):
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        return [{key: value for key, value in json.loads(line).items() if not key.startswith("perf/")} for line in lines]

    def weights(self):
        return (self.run / "final" / "model.safetensors").read_bytes()

    def assert_same_run(self, other):
        assert len(self.metrics()) == STEPS
        assert self.metrics() == other.metrics()
        assert self.weights() == other.weights()


def test_a_run_on_two_nodes_is_stopped_requeued_and_ends_with_the_bits_of_one_that_never_stopped(cluster, tmp_path):
    with cluster(4) as slurm:
        stopped = Task(slurm, tmp_path / "stopped", "--nodes", "2", is_open=False)
        whole = Task(slurm, tmp_path / "whole", "--nodes", "2")
        stopped.wait_until_held()
        slurm.run("scancel", "--batch", "--signal=USR1", stopped.job)  # as SLURM does ahead of a time limit
        slurm.wait_for("the checkpoint", lambda: "requeued: " in stopped.output, seconds=60)
        stopped.open()
        assert stopped.end() == ("COMPLETED", "0", "1")
        assert whole.end() == ("COMPLETED", "0", "0")
        for task, attempts in ((stopped, 2), (whole, 1)):
            assert sorted(path.name for path in task.left.glob("attempt-*")) == [f"attempt-{n + 1}" for n in range(attempts)]
            assert [json.loads((task.left / f"attempt-{attempts}" / f"exit-{n}.json").read_text())["exit_code"] for n in (0, 1)] == [0, 0]
            hosts = {json.loads((task.left / "attempt-1" / f"exit-{n}.json").read_text())["host"] for n in (0, 1)}
            assert len(hosts) == 2
        stopped.assert_same_run(whole)
        assert all(slurm.processes(node, "rloo") == [] for node in slurm.nodes)


@pytest.mark.slow
def test_the_time_limit_makes_the_job_save_and_go_on(cluster, tmp_path):
    with cluster(2) as slurm:
        task = Task(slurm, tmp_path, "--nodes", "2", "--time", "3", "--signal-seconds", "60", is_open=False)
        slurm.wait_for("the signal", lambda: "SIGUSR1: passed on to the training" in task.output, seconds=240)
        task.open()
        assert task.end() == ("COMPLETED", "0", "1")
        assert "from the checkpoint of step" in task.output


@pytest.mark.slow
def test_a_job_that_is_preempted_goes_on_when_the_nodes_are_free_again(cluster, tmp_path):
    with cluster(2) as slurm:
        task = Task(slurm, tmp_path, "--nodes", "2", "--partition", "spot", is_open=False)
        task.wait_until_held()
        other = slurm.submit("#!/bin/bash\nsleep 5\n", "--nodes=2", "--exclusive", "--partition=main", cwd=tmp_path / "other")
        assert slurm.wait_for_end(other, seconds=120)["JobState"] == "COMPLETED"
        task.open()
        assert task.end() == ("COMPLETED", "0", "1")
        assert "SIGUSR1: passed on to the training" in task.output
        assert "resuming runs" in task.output


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["n1", "n2"])
def test_a_job_whose_node_is_powered_off_goes_on_when_it_is_back(lost, cluster, tmp_path):
    with cluster(2) as slurm:
        task = Task(slurm, tmp_path, "--nodes", "2", is_open=False)
        task.wait_until_held()
        slurm.power_off(lost)
        slurm.wait_for("a requeue", lambda: slurm.job(task.job)["Restarts"] == "1", seconds=120)
        slurm.boot(lost)
        task.open()
        task.wait_for_attempt(2)
        assert task.end() == ("COMPLETED", "0", "1")
        assert "resuming runs" in task.output


@pytest.mark.slow
def test_a_machine_that_rloo_misses_before_slurm_does_has_the_job_requeued(cluster, tmp_path):
    with cluster(2, patience=600) as slurm:
        task = Task(slurm, tmp_path, "--nodes", "2", is_open=False)
        task.wait_until_held()
        slurm.power_off("n2")
        slurm.wait_for("a requeue", lambda: "requeued: " in task.output, seconds=400)
        assert "nothing was heard of the end on node 1 of 2: exit code 1" in task.output
        slurm.boot("n2")
        task.open()
        state, code, _ = task.end(seconds=500)  # once more where SLURM's late word about the first start ends the second
        assert (state, code) == ("COMPLETED", "0")
        assert "resuming runs" in task.output


@pytest.mark.slow
def test_a_failing_reward_ends_the_job_with_its_code_and_is_not_tried_again(cluster, tmp_path):
    with cluster(2) as slurm:
        task = Task(slurm, tmp_path, "--nodes", "2", is_open=False)
        (task.folder / "fail").touch()
        task.open()
        assert task.end() == ("FAILED", "4", "0")
        assert "told to fail" in task.output


@pytest.mark.slow
def test_a_refused_recipe_ends_the_job_with_2_and_term_ends_it_with_75(cluster, tmp_path):
    with cluster(2) as slurm:
        task = Task(slurm, tmp_path / "term", "--nodes", "2", is_open=False)
        task.wait_until_held()
        slurm.run("scancel", "--batch", "--signal=TERM", task.job)
        assert task.end() == ("FAILED", "75", "0")
        command = [sys.executable, "-m", "rloo_cli", "slurm", "mine.yaml", "--gpus-per-node", "0", "--nodes", "2", *FEW, "--submit"]
        said = slurm.run(*command, "--sbatch-arg=--hold", cwd=task.folder).splitlines()
        again = said[0].removeprefix("job ")
        assert said[1:] == [f"  squeue --job {again}", f"  tail -F rloo-mine-{again}.out", f"  scancel {again}"]
        (task.folder / "mine.yaml").unlink()
        slurm.run("scontrol", "release", again)
        job = slurm.wait_for_end(again, seconds=120)
        assert (job["JobState"], job["ExitCode"].split(":")[0], job["Restarts"]) == ("FAILED", "2", "0")


@pytest.mark.slow
def test_a_job_that_never_gets_further_ends(cluster, tmp_path):
    with cluster(2) as slurm:
        task = Task(slurm, tmp_path, "--nodes", "2", "--max-requeues", "1", is_open=False)
        for restart in range(2):
            slurm.wait_for("another start", lambda: f"attempt {restart + 1} of job" in task.output, seconds=120)
            slurm.wait_for("a process", lambda: slurm.processes("n2", "rloo_cli.launch.rank") != [], seconds=120)
            pids = slurm.processes("n2", "rloo")
            slurm.run("kill", "-KILL", *map(str, pids), host="n2")
        assert task.end() == ("FAILED", "1", "1")
        assert "not requeued: 2 attempts in a row ended without a new checkpoint" in task.output


@pytest.mark.slow
def test_two_nodes_train_with_a_server_on_the_third_which_is_killed_once(cluster, tmp_path):
    pytest.importorskip("vllm")
    with cluster(3) as slurm:
        task = Task(slurm, tmp_path, "--nodes", "3", "--server-nodes", "1", *VLLM, shipped="quickstart", is_open=False)
        task.wait_until_held()
        assert re.findall(r"server: http://n3:\d+", task.output)
        key = task.left / "attempt-1" / "server.key"
        assert key.stat().st_mode & 0o777 == 0o600
        engine = slurm.processes("n3", "VLLM::EngineCore")
        assert engine
        slurm.run("kill", "-KILL", *map(str, engine), host="n3")
        slurm.wait_for("a requeue", lambda: "requeued: " in task.output, seconds=120)
        assert not key.exists()
        task.open()
        assert task.end(seconds=400) == ("COMPLETED", "0", "1")
        assert "the server ended by itself with 5" in task.output
        assert not (task.left / "attempt-2" / "server.key").exists()
        assert len(task.metrics()) == STEPS
        for node in slurm.nodes:
            slurm.wait_for(f"{node} without a process", lambda: slurm.processes(node, "rloo") == [], seconds=30)


STEPS_ALONE = """
words() { local word; for word in "$@"; do [[ $word == rloo ]] && return; printf '%s\\0' "$word"; done; }
mapfile -d '' -t serve < <(words "${server[@]}")
mapfile -d '' -t train < <(words "${training[@]}")
"${serve[@]}" bash -c 'echo "server $SLURM_NODEID $CUDA_VISIBLE_DEVICES"; while [[ ! -e seen ]]; do sleep 0.1; done' &
srun --overlap --jobid="$SLURM_JOB_ID" --nodes=1 --ntasks=1 --nodelist="$server_node" true     # a shell beside the run starts at once
"${train[@]}" bash -c 'echo "training $SLURM_NODEID $(hostname) $CUDA_VISIBLE_DEVICES"'
touch seen
wait $!
cat "$logs/server.log"
"""


@pytest.mark.parametrize("share", [(), ("--cpus-per-node", "2", "--mem", "500")], ids=["whole nodes", "parts of nodes"])
def test_every_step_sees_the_gpus_of_its_nodes_and_none_waits_for_another(share, cluster, tmp_path):
    command = [sys.executable, "-m", "rloo_cli", "slurm", "deepmath", "--nodes", "3", "--server-nodes", "1", "--gpus-per-node", "8", *share]
    script = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with cluster(3) as slurm:
        job = slurm.submit(script.partition("exec rloo")[0] + STEPS_ALONE, cwd=tmp_path / "job")
        end = slurm.wait_for_end(job, seconds=90)
        said = (tmp_path / "job" / f"rloo-deepmath-{job}.out").read_text()
    assert (end["JobState"], end["ExitCode"]) == ("COMPLETED", "0:0"), said
    gpus = "0,1,2,3,4,5,6,7"
    lines = sorted(line for line in said.splitlines() if line.startswith(("server ", "training ")))
    assert lines == [f"server 0 {gpus}", f"training 0 n1 {gpus}", f"training 1 n2 {gpus}"]
