"""What is decided before processes start, and what their ends are made into."""

import os
import re
import signal
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from rloo_cli.errors import LostRankError, NeighbourError, RewardError, StoppedError
from rloo_cli.inspect.run_state import StateName, read_facts
from rloo_cli.launch.endings import Ending, error_of, last_line
from rloo_cli.launch.job import Job, dump_job, read_job
from rloo_cli.launch.local_ranks import LocalRanks
from rloo_cli.launch.processes import Spread, crowding_told, environments
from rloo_cli.launch.record import lost_neighbours_told
from rloo_cli.plan.prepare import check_recipe
from rloo_cli.recipe.load import load_recipe
from rloo_cli.recipe.processes import process_count, visible_gpus
from rloo_cli.run.environment import usable_cores
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.logs import RankReport, read_rank_reports, write_rank_report


def ending(rank, returncode, reason=None, *, neighbour=False, killed=False):
    report = None if reason is None else RankReport(rank=rank, exit_code=returncode, reason=reason, neighbour=neighbour)
    return Ending(rank=rank, returncode=returncode, was_killed=killed, report=report)


ENDINGS = {
    "a rank's own error": (
        [ending(0, 9, "rank 1 ended the run", neighbour=True), ending(1, 4, "the reward failed")],
        RewardError,
        "the reward failed",
    ),
    "killed": (
        [ending(0, 9, "a rank is gone", neighbour=True), ending(1, -9)],
        LostRankError,
        "rank 1 on .* was ended by SIGKILL without a word",
    ),
    "segfault first": ([ending(1, -11), ending(0, 4, "the reward failed")], LostRankError, "rank 1 on .* was ended by SIGSEGV"),
    "ended by user code": ([ending(1, 3)], LostRankError, "rank 1 on .* ended with exit code 3 without a word"),
    "the others are killed": ([ending(1, 4, "the reward failed"), ending(0, -9, killed=True)], RewardError, "the reward failed"),
    "a bug": ([ending(1, 1, "KeyError: 'x'")], LostRankError, r"rank 1 on .*: KeyError: 'x' \(traceback in .*train-rank-1.log\)"),
    "stopped": ([ending(1, 75, "stopped: 1"), ending(0, 75, "stopped: 0")], StoppedError, "stopped: 0"),
    "stopped and hung": ([ending(1, 75, "stopped: 1"), ending(0, -9, killed=True)], StoppedError, "stopped: 1"),
    "failed while stopping": ([ending(1, 75, "stopped"), ending(0, 4, "the reward failed")], RewardError, "the reward failed"),
    "neighbours alone": (
        [ending(0, 9, "gone", neighbour=True), ending(1, 9, "gone", neighbour=True)],
        LostRankError,
        "lost each other; rank 0 first: gone",
    ),
    "hung at the end": ([ending(0, 0, ""), ending(1, -9, killed=True)], LostRankError, "lost each other; rank 1 first"),
}


@pytest.mark.parametrize("case", list(ENDINGS))
def test_the_error_is_that_of_the_first_rank_whose_failure_was_its_own(case, tmp_path):
    endings, kind, says = ENDINGS[case]
    error = error_of(endings, tmp_path)
    assert type(error) is kind
    with pytest.raises(kind, match=says):
        raise error
    assert error.exit_code != NeighbourError.exit_code


def test_a_signal_after_a_rank_has_told_its_end_changes_nothing(tmp_path):
    def late(rank, code):
        report = RankReport(rank=rank, exit_code=code, reason="stopped" if code else "")
        return Ending(rank=rank, returncode=-15, was_killed=False, report=report)

    assert error_of([late(1, 0), late(0, 0)], tmp_path) is None
    assert type(error_of([late(1, 75), late(0, 75)], tmp_path)) is StoppedError


def test_ranks_that_all_trained_to_the_end_are_no_error(tmp_path):
    assert error_of([ending(1, 0, ""), ending(0, 0, "")], tmp_path) is None


def test_the_last_line_of_a_log_is_told(tmp_path):
    (tmp_path / "a.log").write_text("x\n" * 9000 + "Fatal Python error: Segmentation fault\n\n")
    assert last_line(tmp_path / "a.log") == "Fatal Python error: Segmentation fault"
    assert last_line(tmp_path / "none.log") == ""
    (tmp_path / "b.log").write_text("2026-11-29 21:59:07,301 INFO rloo_cli.launch.local: 200 prompts, " + "x" * 200 + "\n")
    assert last_line(tmp_path / "b.log") == "200 prompts, " + "x" * 106 + "…"


def test_a_rank_that_was_stopped_hears_a_signal(tmp_path):
    with LocalRanks(tmp_path, tmp_path / "absent.json", [{**os.environ, "RANK": "0"}]) as ranks:
        ranks.kill()
        process = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=subprocess.PIPE)
        process.stdout.readline()
        ranks._running[0] = process
        process.send_signal(signal.SIGSTOP)
        ranks.signal("SIGTERM")
        assert process.wait(timeout=30) == -signal.SIGTERM


def test_a_launcher_tells_for_a_rank_that_died_without_a_word(tmp_path):
    (tmp_path / "logs" / "attempt-1").mkdir(parents=True)
    attempt = tmp_path / "logs" / "attempt-1"
    write_rank_report(attempt, RankReport(rank=0, exit_code=9, reason="another process is gone", neighbour=True))
    with LocalRanks(attempt, attempt / "absent.json", [{**os.environ, "RANK": "1", "RLOO_LAUNCHER": str(os.getpid())}]) as ranks:
        ranks._running[1].kill()
        ranks._running[1].wait()
        (died,) = ranks.collect()
    assert (died.returncode, died.report) == (-9, None)
    silent = read_rank_reports(attempt)[1]
    assert (silent.exit_code, silent.silent, silent.neighbour) == (-9, True, False)
    assert type(error_of([died], attempt)) is LostRankError
    summary = read_facts(tmp_path, now=datetime.now().astimezone()).summary
    assert (summary.state, summary.exit_code) == (StateName.DIED, 1)
    assert re.fullmatch(r"rank 1 on \S+ was ended by SIGKILL without a word", summary.reason)


def test_each_rank_gets_its_place_and_its_share_of_the_cores():
    first, second = environments(Spread.of_one_machine(2), {"HOME": "/x"}, gpus=0)
    assert (first["RANK"], first["LOCAL_RANK"], second["RANK"], second["LOCAL_RANK"]) == ("0", "0", "1", "1")
    assert first["WORLD_SIZE"] == second["LOCAL_WORLD_SIZE"] == "2"
    assert (first["MASTER_ADDR"], first["MASTER_PORT"]) == ("127.0.0.1", second["MASTER_PORT"])
    assert first["OMP_NUM_THREADS"] == str(max(1, usable_cores() // 2))
    assert (first["ACCELERATE_USE_CPU"], first["HOME"]) == ("true", "/x")
    with_gpus, _ = environments(Spread.of_one_machine(2), {"OMP_NUM_THREADS": "7"}, gpus=2)
    assert with_gpus["OMP_NUM_THREADS"] == "7"
    assert "ACCELERATE_USE_CPU" not in with_gpus


def test_more_processes_than_cores_get_a_word():
    cores = usable_cores()
    assert crowding_told(cores, 0) == crowding_told(cores + 1, cores + 1) == ()
    assert crowding_told(cores + 1, 0)[0].startswith(f"note: {cores + 1} processes on {cores} core")


@pytest.mark.parametrize(("layout", "count", "told"), [("fsdp2", 1, True), ("fsdp2", 2, False), ("ddp", 1, False)])
def test_a_strategy_with_nothing_to_cut_gets_a_word(layout, count, told):
    loaded = load_recipe("recipes/smoke.yaml", overrides=[f"accelerate_config={layout}"], num_processes=count, is_training=True, environ={})
    assert any("there is one, which holds everything" in notice for notice in loaded.notices) == told


def test_ranks_of_a_second_machine_count_on_and_meet_at_the_first():
    spread = Spread(local=2, world=4, machine_rank=1, host="head", port=29500, has_store=True, interface="eth1")
    asked = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "NCCL_SOCKET_IFNAME": "ib0"}
    third, fourth = environments(spread, asked, gpus=2)
    assert [(each["RANK"], each["LOCAL_RANK"], each["GROUP_RANK"]) for each in (third, fourth)] == [("2", "0", "1"), ("3", "1", "1")]
    assert (third["WORLD_SIZE"], third["LOCAL_WORLD_SIZE"], third["MASTER_ADDR"], third["MASTER_PORT"]) == ("4", "2", "head", "29500")
    assert third["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert (third["GLOO_SOCKET_IFNAME"], third["NCCL_SOCKET_IFNAME"]) == ("eth1", "ib0")  # what a user has set stays
    assert not {"ACCELERATE_USE_FSDP", "FSDP_VERSION", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"} & third.keys()


@pytest.mark.parametrize(
    ("environ", "count"),
    [({}, 3), ({"CUDA_VISIBLE_DEVICES": "0,2"}, 2), ({"CUDA_VISIBLE_DEVICES": ""}, 0), ({"CUDA_VISIBLE_DEVICES": "1,-1,0"}, 1)],
)
def test_visible_gpus_are_counted_without_cuda(tmp_path, environ, count):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus(environ, tmp_path) == count


def test_as_many_processes_as_asked_for_and_one_where_nothing_is_said_on_a_cpu():
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    assert process_count(3, hidden) == 3
    assert process_count("auto", hidden) == 1
    assert process_count("auto", hidden, num_machines=3) == 3
    assert process_count("auto", hidden, filed=8, num_machines=2) == 8


def test_a_rank_is_told_all_that_was_decided(tmp_path):
    checked = check_recipe("smoke", overrides=["run.num_processes=2", "temperature=0.5"])
    job = Job(
        checked=checked,
        folder=RunFolder(tmp_path / "run"),
        resume=Path("checkpoints/000004"),
        attempt=tmp_path / "logs",
        command=("rloo", "train"),
        trust_remote_code=False,
        quiet=False,
        notes=("note: a",),
    )
    told = read_job(dump_job(job), rank=1)
    assert told.checked.loaded.recipe == checked.loaded.recipe
    assert told.checked.loaded.recipe.training.model_fields_set == checked.loaded.recipe.training.model_fields_set
    assert "threads" not in told.checked.loaded.recipe.training.model_fields_set
    assert told.checked.loaded.batch == checked.loaded.batch
    assert told.checked.sources == checked.sources
    assert told.checked.loaded.locate("rewards[1].function") == checked.loaded.locate("rewards[1].function")
    assert (told.world_size, told.rank, told.is_main, told.quiet) == (2, 1, False, True)
    assert (told.folder, told.resume, told.attempt, told.notes) == (job.folder, job.resume, job.attempt, job.notes)


def test_what_torch_says_of_a_lost_neighbour_is_not_taken_for_a_fault_of_this_rank():
    with pytest.raises(RuntimeError, match="ours"), lost_neighbours_told():
        raise RuntimeError("ours")
    with pytest.raises(NeighbourError, match="another process of the run is gone"), lost_neighbours_told():
        dist.TCPStore("127.0.0.1", 1, timeout=timedelta(milliseconds=50))
