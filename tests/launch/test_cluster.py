"""Which machines train together: from the command line, SLURM's variables, or a file; and the store in which their launchers meet."""

import contextlib
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest
from processes import free_port

from rloo_cli.cli.app import exit_code_of
from rloo_cli.errors import LostRankError, RefusedError, StorageError
from rloo_cli.launch.cluster import Cluster, MachineOptions, choose_cluster, local_share, machines_asked
from rloo_cli.launch.endings import Ending
from rloo_cli.launch.interface import interface_of, interface_to
from rloo_cli.launch.meeting import Greeting, error_told, joined, opened, told_of
from rloo_cli.launch.step import Step, first_host, step_of, told_of_other_nodes
from rloo_cli.launch.watch import Watch
from rloo_cli.plan.resume import recipe_for_resume
from rloo_cli.recipe.distribution import Distribution
from rloo_cli.recipe.install import install_command
from rloo_cli.recipe.load import load_recipe
from rloo_cli.run.signals import StopSignal

STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_JOB_NUM_NODES": "5",
}
ALONE = Distribution()


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n[1-3,9],m5", "n1"),
        ("gpu[003,007]", "gpu003"),
        ("m5,n[1-3]", "m5"),
        ("rack[2-3]n[04-05]", "rack2n04"),
        ("a[1-2]-ib", "a1-ib"),
    ],
)
def test_the_first_host_of_a_node_list(nodes, host):
    assert first_host(nodes) == host


def test_a_slurm_step_says_which_machine_this_is():
    step = step_of(STEP)
    assert (step.num_machines, step.machine_rank, step.first_host) == (2, 1, "gpu003")
    assert step.port == step_of({**STEP, "SLURM_NODEID": "0"}).port != step_of({**STEP, "SLURM_STEP_ID": "4"}).port
    assert 10000 <= step.port < 20000
    assert choose_cluster(MachineOptions(), step, ALONE) == Cluster(num_machines=2, machine_rank=1, host="gpu003", port=step.port)
    assert told_of_other_nodes(STEP) is None


def test_outside_of_a_step_of_several_nodes_slurm_says_nothing():
    script = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    assert step_of({}) is step_of(script) is step_of({**STEP, "SLURM_STEP_NUM_NODES": "1"}) is None
    assert step_of({**STEP, "SLURM_STEP_ID": "4294967290"}) is None  # the shell of salloc
    assert "only this one trains: `srun --ntasks-per-node=1" in told_of_other_nodes(script)
    assert told_of_other_nodes({}) is told_of_other_nodes({**script, "SLURM_JOB_NUM_NODES": "1"}) is None


@pytest.mark.parametrize("tasks", ["8(x2)", "1,2"])
def test_several_tasks_on_a_node_are_refused_with_the_way_to_do_it(tasks):
    with pytest.raises(RefusedError, match=r"srun --ntasks-per-node=1 --gpus-per-node=[28] rloo train"):
        step_of({**STEP, "SLURM_STEP_TASKS_PER_NODE": tasks})


def test_the_command_line_wins_over_slurm_and_slurm_over_a_file():
    step = Step(num_machines=2, machine_rank=1, first_host="n1", port=12345)
    filed = Distribution(num_machines=4, machine_rank=3, main_process_ip="head", main_process_port=29501)
    assert choose_cluster(MachineOptions(), None, filed) == Cluster(num_machines=4, machine_rank=3, host="head", port=29501)
    assert choose_cluster(MachineOptions(), step, filed) == Cluster(num_machines=2, machine_rank=1, host="n1", port=12345)
    asked = MachineOptions(num_machines=3, machine_rank=0, main_process_ip="10.0.0.1")
    assert choose_cluster(asked, step, filed) == Cluster(num_machines=3, machine_rank=0, host="10.0.0.1", port=12345)
    assert choose_cluster(asked, None, ALONE).port == 29500
    assert choose_cluster(MachineOptions(num_machines=1), step, ALONE) is None
    assert (machines_asked(MachineOptions(), None), machines_asked(MachineOptions(num_machines=1), step)) == (None, 1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            MachineOptions(num_machines=2, main_process_ip="a"),
            "--machine-rank is missing: 0 on the machine that --main-process-ip names, 1 on the other.",
        ),
        (MachineOptions(num_machines=2, machine_rank=2, main_process_ip="a"), "--machine-rank 2: 2 machines count from 0 to 1"),
        (MachineOptions(num_machines=2, machine_rank=1), "--main-process-ip is missing"),
        (MachineOptions(machine_rank=1, main_process_port=1), "--machine-rank, --main-process-port: one machine needs none of these"),
    ],
)
def test_what_is_missing_or_too_much_is_named(options, says):
    with pytest.raises(RefusedError, match=says):
        choose_cluster(options, None, ALONE)


def test_processes_count_those_of_all_machines():
    assert local_share(16, 2) == 8
    with pytest.raises(RefusedError, match="5 processes on 2 machines: all start equally many, so that 4 or 6 would do"):
        local_share(5, 2)
    with pytest.raises(RefusedError, match="1 processes on 2 machines: all start equally many, so that 2 would do"):
        local_share(1, 2)
    assert load_recipe("recipes/smoke.yaml", num_machines=3, environ={"CUDA_VISIBLE_DEVICES": ""}).num_processes == 3


def test_the_interface_is_that_of_the_address():
    loopback = next(name for name, entries in psutil.net_if_addrs().items() if any(entry.address == "127.0.0.1" for entry in entries))
    assert interface_to("127.0.0.1", 29500) == interface_of("127.0.1.1") == loopback
    assert interface_of("192.0.2.1") is None
    assert interface_to("no.such.host.invalid", 29500) is None


def greeting(machine, **changes):
    values = {
        "version": "rloo 1",
        "num_processes": 4,
        "num_machines": 2,
        "gpus": 0,
        "recipe": {"training": {"seed": 1}},
        "reached": "127.0.0.1",
    }
    return Greeting(**{"machine": machine, "host": f"host{machine}", **values, **changes})


@contextlib.contextmanager
def follower(port, *, machine=1, says=None, after=lambda meeting: meeting.wait_for_word(print)):
    """A second machine in a thread; what it came to, or the error, is in the list."""
    came = []

    def run():
        try:
            with joined(Cluster(num_machines=2, machine_rank=machine, host="127.0.0.1", port=port), print) as (meeting, reached):
                meeting.greet(says or greeting(machine))
                came.append((reached, after(meeting)))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            came.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield came
    finally:
        thread.join(timeout=30)
        assert not thread.is_alive()


def lead(port, monkeypatch):
    monkeypatch.setattr("rloo_cli.launch.meeting.LATE_SECONDS", 1.0)
    return opened(Cluster(num_machines=2, machine_rank=0, host="127.0.0.1", port=port))


def test_machines_that_came_for_the_same_get_the_word_of_the_first(monkeypatch):
    port = free_port()
    with follower(port) as came, lead(port, monkeypatch) as meeting:
        meeting.gather(greeting(0), print)
        meeting.speak("job", attempt="logs/attempt-1")
    ((reached, word),) = came
    assert (reached, word["word"], word["attempt"], word["hosts"]["1"]) == ("127.0.0.1", "job", "logs/attempt-1", "host1")
    assert meeting.interface == interface_of("127.0.0.1")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": "rloo 2"}, r"machine 1 \(host1\) has rloo 2, and machine 0 \(host0\) rloo 1: install the same"),
        ({"num_machines": 3}, r"machine 1 \(host1\) was told of 3 machines, and machine 0 of 2"),
        ({"num_processes": 16, "gpus": 8}, r"counts 16 processes on all machines, and machine 0 4 \(8 and 0 GPUs can be seen\)"),
        ({"recipe": {"training": {"seed": 2}}}, r"another recipe than machine 0 \(host0\): training.seed is 2 there and 1 here"),
    ],
)
def test_a_machine_that_came_for_something_else_is_refused_on_both(changes, says, monkeypatch):
    port = free_port()
    with follower(port, says=greeting(1, **changes)) as came:
        with pytest.raises(RefusedError, match=says), lead(port, monkeypatch) as meeting:
            meeting.gather(greeting(0), print)
    with pytest.raises(RefusedError, match=says):
        raise came[0]


def test_the_failure_of_one_machine_is_told_to_the_other(monkeypatch):
    def fail(meeting):
        raise StorageError("no such folder")

    port = free_port()
    with follower(port) as came, pytest.raises(StorageError, match="disk full"), lead(port, monkeypatch):
        raise StorageError("disk full")
    with pytest.raises(StorageError, match=r"machine 0 \(.*\): disk full"):
        raise came[0]
    with follower(port, after=fail), pytest.raises(StorageError, match=r"machine 1 \(.*\): no such folder"):  # noqa: PT012
        with lead(port, monkeypatch) as meeting:
            meeting.gather(greeting(0), print)
            for _ in range(200):
                meeting._raise_of_those_who_left()
                time.sleep(0.05)


def test_a_fault_and_a_second_interrupt_keep_their_exit_codes_on_the_way():
    assert [error_told(told_of(error), "").exit_code for error in (KeyError("x"), KeyboardInterrupt(), StorageError("y"))] == [1, 130, 6]


def test_a_port_that_is_taken_is_refused(monkeypatch):
    port = free_port()
    with (
        lead(port, monkeypatch),
        pytest.raises(RefusedError, match=f"^port {port} is already in use on .*: give another by --main-process-port"),
    ):
        with lead(port, monkeypatch):
            pass


@pytest.mark.parametrize("host", ["no.such.invalid", "two..dots"])
def test_a_name_of_machine_0_that_nobody_knows_is_refused_without_waiting_for_the_machine(host, monkeypatch):
    monkeypatch.setattr("rloo_cli.launch.meeting.NAME_SECONDS", 0.5)
    monkeypatch.setattr("rloo_cli.launch.meeting.COME_SECONDS", 30.0)
    cluster = Cluster(num_machines=2, machine_rank=1, host=host, port=free_port())
    with pytest.raises(RefusedError, match=f"--main-process-ip {host}: .* knows no machine of that name"), joined(cluster, print):
        pass


def test_a_name_of_machine_0_may_become_known_late(monkeypatch):
    tries, connect = [], socket.create_connection

    def known_at_the_third_try(where, timeout):
        tries.append(where)
        if len(tries) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return connect(where, timeout=timeout)

    monkeypatch.setattr("rloo_cli.launch.meeting.socket.create_connection", known_at_the_third_try)
    port = free_port()
    with follower(port) as came, lead(port, monkeypatch) as meeting:
        meeting.gather(greeting(0), print)
        meeting.speak("nothing")
    assert came[0][1]["word"] == "nothing", came


class OneRank:
    """A rank that runs until it is killed."""

    def __init__(self):
        self.running, self.heard, self.endings = [0], None, []

    def signal(self, name):
        self.heard = name

    def collect(self):
        ended, self.endings = self.endings, []
        return ended

    def kill(self):
        self.running, self.endings = [], [Ending(rank=0, returncode=-9, was_killed=True, report=None)]


@pytest.mark.slow
def test_a_machine_that_falls_silent_is_given_up_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr("rloo_cli.launch.watch.SILENT_SECONDS", 6.0)
    monkeypatch.setattr("rloo_cli.launch.watch.SILENT_GRACE_SECONDS", 0.1)
    port = free_port()
    (tmp_path / "train-rank-1.log").write_text("step 4\n")
    given_up, ranks = threading.Event(), OneRank()

    def fall_silent(meeting):
        meeting.contact.tell("signal", name="SIGUSR1")
        deadline = time.monotonic() + 60
        while not ranks.heard and time.monotonic() < deadline:
            time.sleep(0.1)
        meeting.contact._closing.set()
        meeting.contact._wake.set()
        given_up.wait(60)

    with follower(port, after=fall_silent), lead(port, monkeypatch) as meeting, StopSignal() as stop:
        meeting.gather(greeting(0), print)
        error = Watch(meeting, ranks, stop, tmp_path, share=1).error_of_all()
        given_up.set()
    assert isinstance(error, LostRankError)
    assert "machine 1 (host1) was silent for" in error.message
    assert "rank 1 there said last: step 4 (log: " in error.message
    assert ranks.heard == "SIGUSR1"


def test_the_launchers_configurations_are_listed_and_printed(capsys):
    assert exit_code_of(["launch-config", "ls"]) == 0
    listed = capsys.readouterr().out
    assert [line.split("\t")[0] for line in listed.splitlines()] == ["name", "ddp", "fsdp2", "zero2", "zero3"]
    assert exit_code_of(["launch-config", "show", "fsdp2"]) == 0
    assert "fsdp_version: 2" in capsys.readouterr().out
    assert exit_code_of(["launch-config", "show", "fsdp"]) == 2


def test_a_recipe_names_its_configuration_and_a_wrong_one_has_its_place(tmp_path, capsys):
    (tmp_path / "old.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 1}\n")
    words = ["train", "smoke", "--output-dir", str(tmp_path / "run"), "--accelerate-config"]
    assert exit_code_of([*words, str(tmp_path / "old.yaml")]) == 2
    said = capsys.readouterr().err
    assert f"run.accelerate_config: {tmp_path / 'old.yaml'}:2:15: fsdp_config.fsdp_version: is 1" in said
    assert exit_code_of([*words, "fsdp"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --accelerate-config fsdp: run.accelerate_config: `fsdp` is none of ddp, fsdp2, zero2, zero3")
    assert said.endswith("; did you mean `fsdp2`?\n")
    (tmp_path / "low.yaml").write_text("distributed_type: MULTI_GPU\nmixed_precision: bf16\n")
    assert exit_code_of([*words, str(tmp_path / "low.yaml"), "--set", "bf16=false"]) == 2
    assert "its mixed_precision is bf16, and the recipe's bf16 is false" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_launchers_layout_is_the_recipes_where_that_says_none_and_refused_where_it_says_another(tmp_path):
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}

    def load(*overrides):
        return load_recipe("recipes/smoke.yaml", overrides=overrides, is_training=True, environ=fsdp)

    assert (load().distribution.strategy, load().recipe.run.accelerate_config) == ("fsdp2", "fsdp2")
    assert load("accelerate_config=fsdp2").distribution == load().distribution
    with pytest.raises(Exception, match="`zero3` is asked for, and the launcher that started this process says fsdp2"):
        load("accelerate_config=zero3")


def test_a_missing_deepspeed_is_told_with_the_way_to_install_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("rloo_cli.plan.extras.find_spec", lambda name: None)
    assert exit_code_of(["train", "smoke", "--output-dir", str(tmp_path / "run"), "--accelerate-config", "zero3"]) == 2
    assert f"zero3 needs DeepSpeed, which is not installed here: {install_command('deepspeed')}" in capsys.readouterr().err


def test_a_resume_takes_another_layout_over_and_says_what_that_changes():
    one, two = (load_recipe("recipes/smoke.yaml", overrides=[f"accelerate_config={name}"]).recipe for name in ("ddp", "fsdp2"))
    recipe, changes = recipe_for_resume(two, one, run=Path("runs/x"))
    assert recipe.run.accelerate_config == "fsdp2"
    assert changes == [
        "run.accelerate_config: 'fsdp2' from here on (was 'ddp'); sums are taken in another order, so that numbers differ by rounding, in bf16 visibly"
    ]
