"""What the environment of a launcher says of this process, and what is refused where it was set by halves or contradicts itself."""

import socket

import pytest

from rloo_cli.cli.app import exit_code_of
from rloo_cli.errors import RefusedError
from rloo_cli.launch.given import COUNTS, NEEDED, Place, place_of, refuse_lone

TWO = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        (TWO | {"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"MASTER_PORT": "abc"}, None),
        (TWO, Place(1, 2)),
        (TWO | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, Place(1, 2)),
        (TWO | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, Place(3, 4, num_machines=2)),
    ],
)
def test_a_launchers_environment_says_which_process_this_is(environ, place):
    assert place_of(environ) == place


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE in .* RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are missing.*`unset WORLD_SIZE`"),
        ({"LOCAL_RANK": "0"}, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are missing.*`unset LOCAL_RANK`"),
        ({"RANK": "1", "MASTER_PORT": "1"}, "RANK in .* WORLD_SIZE, LOCAL_RANK, MASTER_ADDR are missing.*`unset RANK MASTER_PORT`"),
        (TWO | {"MASTER_ADDR": ""}, "MASTER_ADDR is missing"),
        (TWO | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "99999999"}, "MASTER_PORT .* 99999999: ports end at 65535"),
        (TWO | {"MASTER_PORT": "abc"}, "MASTER_PORT .*'abc', no number"),
        (TWO | {"MASTER_PORT": "0"}, "no port"),
        (TWO | {"WORLD_SIZE": "two"}, "WORLD_SIZE .*'two', no number"),
        (TWO | {"RANK": "-1"}, "RANK .*'-1', no number from 0"),
        (TWO | {"LOCAL_RANK": ""}, "LOCAL_RANK .*'', no number"),
        (TWO | {"RANK": "5"}, "RANK 5 of 2 .*`unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT`"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK 5 of 2 .*`unset RANK WORLD_SIZE`"),
        (TWO | {"WORLD_SIZE": "0"}, "RANK 1 of 0"),
        (TWO | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK 2 of 2"),
        (TWO | {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}, "each machine needs equally many"),
    ],
)
def test_an_environment_that_cannot_be_is_refused_by_the_names_of_its_variables(environ, says):
    with pytest.raises(RefusedError, match=says):
        place_of(environ)


ACCELERATE = ["/v/bin/python", "/v/bin/accelerate", "launch"]


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["--num_processes", "2", "-m", "rloo_cli", "train", "a.yaml"], 2),
        (["--cpu", "--num-processes=4", "/v/bin/rloo", "train", "a.yaml"], 4),
        (["--num_processes", "1", "-m", "rloo_cli", "train", "a.yaml"], None),
        (["-m", "rloo_cli", "train", "a.yaml", "--num-processes", "2"], None),
    ],
)
def test_one_process_where_accelerate_was_asked_for_several_is_refused(words, asked):
    if asked is None:
        refuse_lone([*ACCELERATE, *words])
        return
    with pytest.raises(
        RefusedError, match=rf"asked for {asked} processes and has started one.*`rloo train RECIPE --num-processes {asked}`"
    ):
        refuse_lone([*ACCELERATE, *words])


@pytest.mark.parametrize("parent", [[], ["bash"], ["python", "launch", "--num_processes", "2"], ["torchrun", "--nproc_per_node", "2"]])
def test_other_parents_say_nothing(parent):
    refuse_lone(parent)


@pytest.fixture
def launched(monkeypatch):
    """Sets the environment to a launcher's, and nothing else of one."""
    for name in {*COUNTS, *NEEDED, "TORCHELASTIC_USE_AGENT_STORE"}:
        monkeypatch.delenv(name, raising=False)
    return lambda environ: [monkeypatch.setenv(name, value) for name, value in environ.items()]


def test_a_variable_that_was_left_behind_is_refused_before_anything_is_written(launched, tmp_path, capsys):
    launched({"WORLD_SIZE": "2"})
    for words in (["train", "smoke", "--output-dir", str(tmp_path / "run")], ["eval", "smoke"]):
        assert exit_code_of(words) == 2
        assert capsys.readouterr().err.startswith("error: WORLD_SIZE in the environment says that a launcher started this process")
    assert not (tmp_path / "run").exists()


def test_a_port_of_a_launcher_that_is_taken_is_refused_before_anything_is_written(launched, tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        launched(TWO | {"RANK": "0", "MASTER_PORT": str(port)})
        assert exit_code_of(["train", "smoke", "--output-dir", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: MASTER_PORT {port} is already in use on ")
    assert not (tmp_path / "run").exists()
