"""The final model on the hub: asked about before training, uploaded after it, by huggingface_hub's own client."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rloo_cli.errors import RecipeError, StoppedError
from rloo_cli.plan.prepare import errors_placed
from rloo_cli.recipe.hub_rules import REPO_NAME
from rloo_cli.recipe.load import LoadedRecipe
from rloo_cli.recipe.schema import RunSection
from rloo_cli.recipe.secrets import masked, secret_values
from rloo_cli.run import atomic
from rloo_cli.run.folder import RunFolder
from rloo_cli.run.manifest import MANIFEST_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """How an upload ended."""

    line: str
    """For the terminal."""
    is_done: bool


def check_hub(loaded: LoadedRecipe, folder: RunFolder) -> str | None:
    """A notice where the hub does not answer, which need not be so at the end; None where all is well, or nothing is to be uploaded.

    Raises:
        RecipeError: this machine is offline by its settings, there is no token or one that cannot write, or the folder's name is no repository's.
    """
    run = loaded.recipe.run
    if not run.push_to_hub:
        return None
    with errors_placed(loaded):
        return _check(run, folder)


def _check(run: RunSection, folder: RunFolder) -> str | None:
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    name = folder.path.resolve().name
    if run.hub_model_id is None and not REPO_NAME.fullmatch(name):
        raise RecipeError(f"run.hub_model_id: the run folder's name {name!r} cannot be a repository's: say one here.")
    if constants.is_offline_mode():
        raise RecipeError("run.push_to_hub: HF_HUB_OFFLINE is set, so nothing can be uploaded: unset it, or leave push_to_hub out.")
    if get_token() is None:
        raise RecipeError("run.push_to_hub: there is no token for the hub: set HF_TOKEN, or log in by `hf auth login`.")
    try:
        account = HfApi().whoami()
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status in (401, 403):
            raise RecipeError(
                "run.push_to_hub: the hub refuses the token: set another as HF_TOKEN, or log in by `hf auth login`."
            ) from error
        return f"the hub {constants.ENDPOINT} answers with status {status}; the upload is tried at the end all the same"
    except (HTTPError, OSError) as error:
        return f"the hub {constants.ENDPOINT} does not answer ({_reason(error)}); the upload is tried at the end all the same"
    if _role(account) == "read":
        raise RecipeError("run.push_to_hub: the token may only read: make one that may write, and set it as HF_TOKEN.")
    return None


def _role(account: Any) -> object:
    """`read`, `write` or `fineGrained`, as the hub says it of a token; None where it does not."""
    found = account
    for key in ("auth", "accessToken", "role"):
        found = found.get(key) if isinstance(found, dict) else None
    return found


def is_missing_there(run: RunSection, folder: RunFolder) -> bool:
    """Whether the final model is to be on the hub, and was not brought there yet."""
    if not run.push_to_hub:
        return False
    with contextlib.suppress(OSError, ValueError):
        document = json.loads(folder.hub.read_bytes())
        wanted = {"asked": run.hub_model_id, "revision": run.hub_revision, "step": folder.finished_step()}
        return not isinstance(document, dict) or any(document.get(key) != value for key, value in wanted.items())
    return True


def upload_final(run: RunSection, folder: RunFolder) -> Upload:
    """Upload final/; whatever comes of it, the run is done and its model is there.

    Raises:
        StoppedError: Ctrl-C; to go on with the run is to upload it.
    """
    from huggingface_hub.errors import HTTPError

    by_hand = _by_hand(run, folder)
    try:
        with _online():
            return Upload(line=f"uploaded: {_upload(run, folder)}", is_done=True)
    except KeyboardInterrupt as stop:
        raise StoppedError(f"interrupted: the run is complete, but its model was not uploaded. --resume does that, or: {by_hand}") from stop
    except (HTTPError, OSError, ValueError, RuntimeError, LookupError) as error:
        reason = masked(_reason(error), secret_values(os.environ))
        line = f"warning: the run is complete, but its model was not uploaded ({reason}). --resume does that, or: {by_hand}"
        return Upload(line=line, is_done=False)


def _upload(run: RunSection, folder: RunFolder) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    step, hide = folder.finished_step(), not sys.stderr.isatty() and not are_progress_bars_disabled()
    api = HfApi(library_name="rloo")
    if hide:
        disable_progress_bars()
    try:
        repository = api.create_repo(_name(run, folder), private=run.hub_private_repo, exist_ok=True).repo_id
        if run.hub_revision is not None:
            api.create_branch(repository, branch=run.hub_revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=folder.final,
            revision=run.hub_revision,
            commit_message=f"Model after step {step}, by rloo",
            ignore_patterns=[MANIFEST_NAME],
        )
    finally:
        if hide:
            enable_progress_bars()
    document = {"repository": repository, "asked": run.hub_model_id, "revision": run.hub_revision, "step": step, "commit": commit.oid}
    atomic.write_json(folder.hub, document)
    return str(commit.commit_url)


@contextlib.contextmanager
def _online() -> Iterator[None]:
    """For the block, the client asks the hub even where loading found that it did not answer then."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, False
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _by_hand(run: RunSection, folder: RunFolder) -> str:
    """The command that uploads by hand what was not."""
    options = ["--revision", run.hub_revision] if run.hub_revision is not None else []
    options += ["--private"] if run.hub_private_repo else []
    return shlex.join(["hf", "upload", _name(run, folder), str(folder.final), ".", "--exclude", MANIFEST_NAME, *options])


def _name(run: RunSection, folder: RunFolder) -> str:
    return run.hub_model_id or folder.path.resolve().name


def _reason(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
