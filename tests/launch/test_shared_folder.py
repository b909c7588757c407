from __future__ import annotations

from pathlib import Path

from processes import run_ranks

from rloo_cli.errors import RlooError
from rloo_cli.launch.shared_folder import prove_one_folder
from rloo_cli.run.ranks import Ranks, join_ranks


def prove(rank, places):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        prove_one_folder(Path(places[rank]), join_ranks(), patience=0.3)
    except RlooError as error:
        return [type(error).__name__, error.message]
    finally:
        dist.destroy_process_group()
    return []


def test_ranks_that_see_one_folder_go_on_and_leave_nothing(tmp_path):
    (tmp_path / "attempt").mkdir()
    assert run_ranks(prove, 2, tmp_path, [str(tmp_path / "attempt")] * 2) == [[], []]
    assert list((tmp_path / "attempt").iterdir()) == []


def test_a_rank_that_sees_another_folder_says_on_which_host_and_what_is_needed(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    main, blind = run_ranks(prove, 2, tmp_path, [str(tmp_path / "one"), str(tmp_path / "other")])
    assert blind[0] == "RefusedError"
    assert blind[1].startswith("rank 1 on ")
    assert "must be on a file system that all hosts share" in blind[1]
    assert "\n" not in blind[1]
    assert main[0] == "NeighbourError"
    assert blind[1] in main[1]


def test_one_process_has_nothing_to_prove(tmp_path):
    prove_one_folder(tmp_path / "absent", Ranks())
