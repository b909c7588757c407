"""Each look at a thing, with whatever is wrong with it given."""

from __future__ import annotations

import re
import socket

import pytest

from rloo_cli.doctor import machine, software
from rloo_cli.doctor.check import Level
from rloo_cli.doctor.floors import FLOORS, Floor
from rloo_cli.doctor.machine import look_at_clock, look_at_limits, look_at_memory, look_at_ports, look_at_shared_memory
from rloo_cli.doctor.places import look_at_hub, look_at_output
from rloo_cli.doctor.software import look_at_extras, look_at_floors, look_at_packages, look_at_pins, look_at_python
from rloo_cli.doctor.surroundings import look_at_launcher, look_at_slurm
from rloo_cli.doctor.torch_probe import TorchProbe, found_checks

GPU = {"name": "NVIDIA H200", "total_bytes": 140 << 30, "free_bytes": 139 << 30, "capability": "9.0"}
FOUND = {"rank": 0, "gloo": "", "version": "2.13.0+cu130", "cuda": "13.0", "gpus": [GPU], "cuda_error": "", "bf16": True, "nccl": "2.28.3"}
OTHER = {"rank": 1, "gloo": ""}


# --- software --------------------------------------------------------------------------------------------------------------------


def test_this_python_will_do(monkeypatch):
    assert look_at_python().level is Level.OK
    monkeypatch.setattr(software.sys, "version_info", (3, 10, 1))
    assert look_at_python().level is Level.FAIL


def test_packages_that_are_missing_or_other_ones():
    required = ["torch==2.13.0", "transformers>=5.19,<5.20", "vllm==0.32.0; extra == 'vllm'", "rich>=13"]
    fine = {"torch": "2.13.0+cpu", "transformers": "5.19.3", "rich": "14.0"}
    assert look_at_packages(required, fine).level is Level.OK
    wrong = look_at_packages(required, {"torch": "2.12.1", "transformers": "5.19.3"})
    assert wrong.level is Level.FAIL
    assert wrong.said == "torch 2.12.1 is not ==2.13.0, rich is missing"
    assert "pip install" in wrong.remedy


def test_pins_of_a_clone(tmp_path):
    pins = tmp_path / "constraints.txt"
    pins.write_text("# words\ntorch==2.13.0\nnumpy==2.3.5\nruff==0.17.6\n")
    assert look_at_pins(pins, {"torch": "2.13.0+cpu", "numpy": "2.3.5", "ruff": "9"}).level is Level.OK
    other = look_at_pins(pins, {"torch": "2.13.0", "numpy": "2.4.0"})
    assert (other.level, other.said) == (Level.WARN, "numpy 2.4.0 (tested 2.3.5)")
    assert look_at_pins(tmp_path / "none", {}).level is Level.OK


def test_known_holes():
    floors = (Floor("jinja2", "3.1.6", "CVE-1", "leaves the sandbox"), Floor("torch", "2.6.0", "CVE-2", "runs code"))
    below = look_at_floors(floors, {"jinja2": "3.1.5", "torch": "2.13.0+cpu"})
    assert below.level is Level.WARN
    assert below.said == "jinja2 3.1.5 is below 3.1.6 (CVE-1: leaves the sandbox)"
    assert below.remedy == "pip install 'jinja2>=3.1.6'"
    assert look_at_floors(floors, {"jinja2": "3.1.6"}).level is Level.OK
    assert look_at_floors(floors, {"jinja2": "odd version"}).level is Level.OK


def test_the_table_of_holes_is_in_order():
    from packaging.version import Version

    assert len({floor.package for floor in FLOORS}) == len(FLOORS)
    assert all(Version(floor.version) and re.fullmatch(r"CVE-\d{4}-\d{4,}", floor.advisory) for floor in FLOORS)
    assert look_at_floors().level is Level.OK  # what is installed here has none of them


def test_pinned_versions_are_not_below_a_floor():
    clone = software.CONSTRAINTS.parent
    text = "\n".join((clone / name).read_text(encoding="utf-8") for name in ("constraints.txt", "constraints-vllm.txt"))
    pins = {name.lower(): version for name, version in software.PIN.findall(text)}
    assert len(pins.keys() & {floor.package for floor in FLOORS}) > 10
    assert look_at_floors(FLOORS, pins).facts["below"] == []


def test_extras_are_told_and_no_fault(monkeypatch):
    monkeypatch.setattr(software, "find_spec", lambda module: None if module == "vllm" else object())
    assert (look_at_extras().level, look_at_extras().facts["vllm"]) == (Level.OK, False)


# --- the machine -----------------------------------------------------------------------------------------------------------------


def test_limits_of_a_control_group(tmp_path):
    group = tmp_path / "cg" / "job" / "step"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text(f"{1 << 30}\n")
    (group / "cpu.max").write_text("50000 100000\n")
    own = tmp_path / "own"
    own.write_text("0::/job/step\n")
    found = look_at_memory(tmp_path / "cg", own)
    assert (found.facts["limit_bytes"], found.facts["cpu_quota"]) == (1 << 30, 0.5)
    assert found.level is Level.WARN
    assert "this group may take 1.0 GiB" in found.said


def test_limits_of_an_older_control_group(tmp_path):
    group = tmp_path / "cg" / "memory" / "job"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(f"{4 << 30}\n")
    (group.parent / "memory.limit_in_bytes").write_text(f"{(1 << 63) - 4096}\n")
    own = tmp_path / "own"
    own.write_text("7:memory:/job\n3:cpu,cpuacct:/job\nodd line\n")
    assert look_at_memory(tmp_path / "cg", own).facts["limit_bytes"] == 4 << 30
    own.write_text("7:memory:/elsewhere\n")
    assert look_at_memory(tmp_path / "cg", own).facts["limit_bytes"] is None


def test_small_shared_memory(monkeypatch, tmp_path):
    usage = machine.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: type(usage)(64 << 20, 0, 64 << 20))
    assert (look_at_shared_memory().level, "--shm-size" in look_at_shared_memory().remedy) == (Level.WARN, True)
    monkeypatch.undo()
    assert look_at_shared_memory(tmp_path / "none").level is Level.WARN


def test_limits_of_the_shell():
    endless = machine.resource.RLIM_INFINITY
    assert look_at_limits({"files": 65536, "address_space": endless, "locked": 1}).level is Level.OK
    assert look_at_limits({"files": endless, "address_space": endless, "locked": 1}).level is Level.OK
    few = look_at_limits({"files": 1024, "address_space": 8 << 30, "locked": 1})
    assert few.level is Level.WARN
    assert few.remedy.startswith("ulimit -n 65536 and ulimit -v unlimited")


def test_a_clock_of_the_past():
    assert look_at_clock(1_800_000_000).level is Level.OK
    assert look_at_clock(0).level is Level.WARN


def test_a_port_that_is_taken():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        found = look_at_ports({port: "meeting"})
    assert (found.level, found.said) == (Level.WARN, f"{port} (meeting) is taken")
    assert look_at_ports({port: "meeting"}).level is Level.OK


# --- places ----------------------------------------------------------------------------------------------------------------------


def test_the_output_folder_is_tried_and_left_as_it_was(tmp_path):
    found = look_at_output(tmp_path / "runs" / "not-yet")
    assert found.level is not Level.FAIL
    assert found.facts["bytes_per_second"] > 0
    assert abs(found.facts["clock_skew_seconds"]) < 60
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_without_room_or_rights(tmp_path, monkeypatch):
    from rloo_cli.doctor import places
    from rloo_cli.errors import StorageError

    usage = places.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(places.shutil, "disk_usage", lambda folder: type(usage)(1 << 40, 0, 1 << 20))
    assert look_at_output(tmp_path).level is Level.FAIL

    def refuse(path, data):
        raise StorageError(f"cannot write {path}: Read-only file system")

    monkeypatch.setattr(places.atomic, "write_file", refuse)
    assert (look_at_output(tmp_path).level, "Read-only" in look_at_output(tmp_path).said) == (Level.FAIL, True)


def test_the_hubs_cache_and_token(tmp_path):
    (tmp_path / "token").write_text("hf_abcdefgh")
    home = {"HF_HOME": str(tmp_path)}
    assert look_at_hub(home).facts == {**look_at_hub(home).facts, "has_token": True, "offline": False, "cache": str(tmp_path / "hub")}
    told = look_at_hub({**home, "HF_HUB_OFFLINE": "1", "HF_TOKEN": "hf_secretsecret"})
    assert told.facts["offline"] is True
    assert "hf_" not in told.said
    assert look_at_hub({"HF_HOME": str(tmp_path / "x"), "HF_HUB_OFFLINE": "0"}).facts["has_token"] is False


# --- surroundings ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "level", "remedy"),
    [
        ({}, Level.OK, ""),
        ({"MASTER_PORT": "29500"}, Level.OK, ""),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, Level.FAIL, "unset RANK WORLD_SIZE MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}, Level.OK, ""),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, Level.WARN, "unset ACCELERATE_USE_FSDP FSDP_VERSION"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, Level.WARN, "unset CUDA_LAUNCH_BLOCKING"),
        ({"CUDA_LAUNCH_BLOCKING": "0", "TORCH_DISTRIBUTED_DEBUG": "INFO"}, Level.OK, ""),
    ],
)
def test_what_a_launcher_left(environ, level, remedy):
    found = look_at_launcher(environ)
    assert (found.level, found.remedy) == (level, remedy)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"WORLD_SIZE": "2"}, "for a part of what a launcher says, and refuses"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "for a part of what a launcher says, and refuses"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "for the only process of a launcher"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "29500"},
            "one of 2 processes, and waits for the others",
        ),
    ],
)
def test_what_a_run_makes_of_them(environ, said):
    assert said in look_at_launcher(environ).said


def test_slurm():
    assert look_at_slurm({}).level is Level.OK
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    assert (look_at_slurm(job).level, "only this one trains" in look_at_slurm(job).said) == (Level.WARN, True)
    step = {
        **job,
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NODELIST": "n[1-2]",
    }
    assert "machine 1 of 2, the first is n1" in look_at_slurm(step).said
    assert look_at_slurm({**step, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}).level is Level.FAIL


# --- torch -----------------------------------------------------------------------------------------------------------------------


def levels(first, second=OTHER, gpus_there=1) -> dict[str, Level]:
    return {check.name: check.level for check in found_checks(first, second, gpus_there=gpus_there)}


def test_a_machine_with_a_gpu():
    assert set(levels(FOUND).values()) == {Level.OK}
    said = {check.name: check.said for check in found_checks(FOUND, OTHER, gpus_there=1)}
    assert said["gpus"] == "0: NVIDIA H200, 139 of 140 GiB free"


def test_gpus_that_cannot_be_used():
    cpu_build = {**FOUND, "cuda": None, "gpus": [], "nccl": None, "bf16_speed": 2.0}
    assert levels(cpu_build, gpus_there=2)["torch"] is Level.FAIL
    assert levels(cpu_build, gpus_there=0)["torch"] is Level.OK
    old_driver = {**FOUND, "gpus": [], "cuda_error": "The NVIDIA driver on your system is too old"}
    (torch, *_) = found_checks(old_driver, OTHER, gpus_there=1)
    assert (torch.level, "too old" in torch.said, "driver" in torch.remedy) == (Level.FAIL, True, True)


def test_busy_old_and_silent_gpus():
    assert levels({**FOUND, "gpus": [GPU, {**GPU, "free_bytes": 1 << 30}]})["gpus"] is Level.WARN
    assert levels({**FOUND, "bf16": False})["bf16"] is Level.WARN
    assert levels({**FOUND, "nccl": None})["nccl"] is Level.OK  # one GPU has nobody to talk to
    assert levels({**FOUND, "nccl": None, "gpus": [GPU, GPU]})["nccl"] is Level.FAIL
    assert levels({**FOUND, "gloo": "connection refused"})["gloo"] is Level.WARN
    assert levels(FOUND, "no answer")["gloo"] is Level.WARN


def test_a_torch_that_cannot_be_imported(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    (check,) = TorchProbe({"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin"}).checks()
    assert (check.level, check.name) == (Level.FAIL, "torch")
    assert "libcudart.so.13: cannot open shared object file" in check.said


def test_a_torch_that_hangs_is_ended(tmp_path):
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(100)\n")
    probe = TorchProbe({"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin"}, seconds=0.5)
    (check,) = probe.checks()
    assert (check.level, "no answer" in check.said, "pip" in check.remedy) == (Level.FAIL, True, False)
    assert all(child.returncode is not None for child in probe._children)
