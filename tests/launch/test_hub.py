from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fake_hub import fake_hub

from rloo_cli.errors import RecipeError, StoppedError
from rloo_cli.launch import hub as ours
from rloo_cli.launch.hub import check_hub, is_missing_there, upload_final
from rloo_cli.recipe.load import load_recipe
from rloo_cli.run.atomic import AtomicFolder
from rloo_cli.run.folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
SMOKE = ROOT / "recipes" / "smoke.yaml"


@pytest.fixture
def hub(monkeypatch):
    from huggingface_hub import constants

    with fake_hub() as there:
        monkeypatch.setattr(constants, "ENDPOINT", there.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", there.token)
        yield there


@pytest.fixture
def finished(tmp_path):
    folder = RunFolder(tmp_path / "my-run")
    with AtomicFolder(folder.final, info={"kind": "final", "step": 7}) as files:
        files.write("README.md", "---\ntags: [rloo]\n---\n# card\n")
        files.write("model.safetensors", b"weights")
    return folder


def loaded(*overrides):
    return load_recipe(SMOKE, overrides=["push_to_hub=true", *overrides])


def section(*overrides):
    return loaded(*overrides).recipe.run


def test_the_final_folder_is_uploaded_without_our_manifest(hub, finished):
    run = section()
    assert is_missing_there(run, finished)
    upload = upload_final(run, finished)
    assert (upload.is_done, upload.line) == (True, f"uploaded: {hub.url}/me/my-run/commit/c0ffee")
    assert hub.repositories == {"me/my-run": None}
    assert hub.commits == [("me/my-run", "main", {"README.md": b"---\ntags: [rloo]\n---\n# card\n", "model.safetensors": b"weights"})]
    assert json.loads(finished.hub.read_text()) == {
        "repository": "me/my-run",
        "asked": None,
        "revision": None,
        "step": 7,
        "commit": "c0ffee",
    }
    assert not is_missing_there(run, finished)


def test_repository_privacy_and_branch_are_those_of_the_recipe(hub, finished):
    run = section("hub_model_id=team/model", "hub_private_repo=true", "hub_revision=tries/1")
    assert upload_final(run, finished).is_done
    assert hub.repositories == {"team/model": "private"}
    assert hub.branches == [("team/model", "tries%2F1")]
    assert hub.commits[0][:2] == ("team/model", "tries%2F1")
    assert not is_missing_there(run, finished)
    assert is_missing_there(section("hub_model_id=team/model"), finished)  # asked for on another branch now
    assert upload_final(section("hub_model_id=team/model"), finished).is_done  # the repository is there already


def test_a_failed_upload_is_one_line_with_the_command_and_may_be_tried_again(hub, finished):
    hub.refuses_commits = True
    run = section("hub_model_id=team/model", "hub_private_repo=true", "hub_revision=next")
    upload = upload_final(run, finished)
    assert not upload.is_done
    assert upload.line.startswith("warning: the run is complete, but its model was not uploaded (")
    assert "\n" not in upload.line
    assert shlex.split(upload.line.rpartition("or: ")[2]) == [
        *("hf", "upload", "team/model", str(finished.final), ".", "--exclude", "manifest.json", "--revision", "next", "--private")
    ]
    assert is_missing_there(run, finished)
    hub.refuses_commits = False
    assert upload_final(run, finished).is_done


def test_a_hub_that_is_away_is_a_warning_and_no_token_is_shown(hub, finished, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:9/{hub.token}")
    upload = upload_final(section(), finished)
    assert not upload.is_done
    assert hub.token not in upload.line


def test_ctrl_c_while_uploading_says_how_to_go_on(hub, finished, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(ours, "_upload", interrupt)
    with pytest.raises(StoppedError, match=r"the run is complete, but its model was not uploaded.*hf upload my-run "):
        upload_final(section(), finished)


def test_loading_that_went_offline_does_not_keep_the_model_here(hub, finished, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert upload_final(section(), finished).is_done
    assert constants.HF_HUB_OFFLINE is True


def test_before_training_all_is_well(hub, finished):
    assert check_hub(loaded(), finished) is None
    assert hub.repositories == {}  # nothing is made before there is something to put into it


def test_nothing_is_asked_where_nothing_is_uploaded(finished, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert check_hub(load_recipe(SMOKE), finished) is None
    assert not is_missing_there(load_recipe(SMOKE).recipe.run, finished)


def refusal(finished, *overrides):
    with pytest.raises(RecipeError) as caught:
        check_hub(loaded(*overrides), finished)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_token_is_needed(hub, finished, monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "run.push_to_hub: there is no token for the hub: set HF_TOKEN, or log in by `hf auth login`." in refusal(finished)


def test_a_token_that_is_refused_or_may_only_read_is_found_before_training(hub, finished, monkeypatch):
    hub.role = "read"
    assert "run.push_to_hub: the token may only read" in refusal(finished)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    message = refusal(finished)
    assert message.startswith("--set push_to_hub=true")
    assert "run.push_to_hub: the hub refuses the token" in message
    assert "hf_wrong" not in message


def test_offline_mode_is_found_before_training(hub, finished, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "run.push_to_hub: HF_HUB_OFFLINE is set" in refusal(finished)


def test_a_folder_whose_name_is_no_repositorys_needs_one(hub, tmp_path):
    assert "run.hub_model_id: the run folder's name 'my run' cannot be a repository's" in refusal(RunFolder(tmp_path / "my run"))


def test_a_hub_that_does_not_answer_before_training_is_a_notice(hub, finished, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    notice = check_hub(loaded(), finished)
    assert notice is not None
    assert notice.startswith("the hub http://127.0.0.1:9 does not answer (")


BAD_NAMES = ["a/b/c", "a b", "-a", "a--b", "a..b", "a/", "/a", "x" * 97, "a.git", "ä", "a/.b"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_are_no_repositorys_are_refused_with_their_place(name):
    with pytest.raises(RecipeError, match=r"run\.hub_model_id: '.*' is no repository's name: write `owner/name`"):
        loaded(f"hub_model_id={json.dumps(name)}")


@pytest.mark.parametrize("name", ["a b", "a..b", "/a", "a/", "-x", "a.lock", "a~1", "x" * 300])
def test_names_that_are_no_branchs_are_refused_with_their_place(name):
    with pytest.raises(RecipeError, match=r"run\.hub_revision: '.*' is no branch's name"):
        loaded(f"hub_revision={json.dumps(name)}")


@pytest.mark.parametrize("name", ["me/model", "model", "a-b_c.d", "A1/b", "x" * 96])
def test_the_hubs_own_client_takes_the_names_that_are_taken(name):
    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(loaded(f"hub_model_id={name}").recipe.run.hub_model_id)


def test_what_is_not_read_is_told():
    notices = load_recipe(SMOKE, overrides=["hub_model_id=me/x", "hub_private_repo=true"]).notices
    assert sum(notice.endswith("not read: push_to_hub is false.") for notice in notices) == 2


def train(*arguments, **environment):
    known = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    return subprocess.run(
        [sys.executable, "-m", "rloo_cli", "train", "recipes/smoke.yaml", "--set", "push_to_hub=true", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        env={**known, "OMP_NUM_THREADS": "1", **environment},
    )


def test_a_run_is_uploaded_once_and_a_failed_upload_is_made_up_for(tmp_path):
    with fake_hub() as hub:
        asked = ["-o", str(tmp_path / "run"), "--set", "hub_model_id=team/smoke"]
        environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token}
        hub.refuses_commits = True
        first = train(*asked, **environment)
        assert first.returncode == 0, first.stderr
        assert "warning: the run is complete, but its model was not uploaded (" in first.stderr
        assert "done: " in first.stdout
        hub.refuses_commits = False
        second = train(*asked, "--resume=auto", **environment)
        assert (second.returncode, second.stdout) == (0, f"uploaded: {hub.url}/team/smoke/commit/c0ffee\n"), second.stderr
        third = train(*asked, "--resume=auto", **environment)
        assert third.returncode == 0
        assert "finished already, nothing to do" in third.stdout
    ((repository, revision, files),) = hub.commits
    assert (repository, revision) == ("team/smoke", "main")
    assert {"README.md", "model.safetensors", "config.json", "tokenizer.json"} <= files.keys()
    front = yaml.safe_load(files["README.md"].decode().split("---\n")[1])
    assert front == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["rloo", "reinforcement-learning"]}
    assert hub.token not in "".join(path.read_text("utf-8", "replace") for path in (tmp_path / "run").rglob("*") if path.is_file())


def test_without_a_token_nothing_is_begun(tmp_path):
    done = train("-o", str(tmp_path / "run"), HF_TOKEN="", HF_HOME=str(tmp_path / "home"))
    assert done.returncode == 2
    assert "run.push_to_hub: there is no token for the hub" in done.stderr
    assert not (tmp_path / "run").exists()
