"""What a process that trains is told: everything that was decided once, before any of them began."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rloo_cli.errors import RlooError
from rloo_cli.plan.prepare import CheckedRecipe
from rloo_cli.recipe.batch import plan_batches
from rloo_cli.recipe.distribution import Distribution
from rloo_cli.recipe.load import LoadedRecipe
from rloo_cli.recipe.schema import Recipe, TrainingSection
from rloo_cli.rewards.models import find_entry
from rloo_cli.run.folder import RunFolder

Resume = Literal["latest"] | int | Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A rank's part of one attempt. The folder is locked, and the attempt's folder made, by whoever gives it."""

    checked: CheckedRecipe
    folder: RunFolder
    resume: Resume
    """The checkpoint to go on from; None for a new run."""
    attempt: Path
    """The attempt's log folder."""
    command: tuple[str, ...]
    """The command line that began it, as it may be kept."""
    trust_remote_code: bool
    quiet: bool
    """Whether nothing is shown, not even by the main rank."""
    rank: int = 0
    notes: tuple[str, ...] = ()
    """Shown first."""

    @property
    def world_size(self) -> int:
        """Processes that train together."""
        return self.checked.loaded.num_processes

    @property
    def is_main(self) -> bool:
        """Whether this rank shows what happens, and writes what the run leaves."""
        return self.rank == 0


def dump_job(job: Job) -> str:
    """A job as JSON, for `read_job` in another process. It holds no secret that the run folder would not."""
    loaded = job.checked.loaded
    document = {
        "recipe": loaded.recipe.model_dump(mode="json"),
        "asked": sorted(loaded.recipe.training.model_fields_set),
        "num_processes": loaded.num_processes,
        "num_machines": loaded.num_machines,
        "distribution": asdict(loaded.distribution),
        "path": str(loaded.path),
        "source_text": loaded.source_text,
        "places": _places(loaded),
        "code_dir": str(job.checked.code_dir),
        "folder": str(job.folder.path),
        "resume": {"path": str(job.resume)} if isinstance(job.resume, Path) else job.resume,
        "attempt": str(job.attempt),
        "command": list(job.command),
        "trust_remote_code": job.trust_remote_code,
        "quiet": job.quiet,
        "notes": list(job.notes),
    }
    return json.dumps(document)


def read_job(text: str, *, rank: int) -> Job:
    """The job of a rank; what `dump_job` gave. The recipe was found valid already.

    Raises:
        RlooError: it is another version's.
    """
    try:
        return _job(json.loads(text), rank)
    except (KeyError, TypeError, ValueError) as error:
        raise RlooError(f"rank {rank} cannot read what it is to do: {error}. All processes need the same version of rloo.") from error


def _job(document: Mapping[str, Any], rank: int) -> Job:
    recipe = Recipe.model_validate_json(json.dumps(document["recipe"]))
    training = TrainingSection.model_construct(_fields_set=set(document["asked"]), **dict(recipe.training))
    recipe = recipe.model_copy(update={"training": training})
    places, path, code_dir = document["places"], document["path"], Path(document["code_dir"])
    count = document["num_processes"]
    loaded = LoadedRecipe(
        recipe=recipe,
        path=Path(path),
        source_text=document["source_text"],
        notices=(),
        num_processes=count,
        num_machines=document["num_machines"],
        distribution=Distribution(**document["distribution"] | {"notes": ()}),
        batch=plan_batches(recipe, count),
        locate=lambda field: places.get(field, path),
    )
    sources = tuple(find_entry(entry, code_dir=code_dir) for entry in recipe.rewards)
    resume = document["resume"]
    return Job(
        checked=CheckedRecipe(loaded=loaded, code_dir=code_dir, sources=sources),
        folder=RunFolder(Path(document["folder"])),
        resume=Path(resume["path"]) if isinstance(resume, dict) else resume,
        attempt=Path(document["attempt"]),
        command=tuple(document["command"]),
        trust_remote_code=document["trust_remote_code"],
        quiet=document["quiet"] or rank > 0,
        rank=rank,
        notes=tuple(document["notes"]),
    )


def _places(loaded: LoadedRecipe) -> dict[str, str]:
    """Where each field stands in the recipe's file."""
    fields = []
    for section, values in loaded.recipe.model_dump(mode="json").items():
        entries = {f"{section}[{i}]": entry for i, entry in enumerate(values)} if section == "rewards" else {section: values}
        fields += [f"{prefix}.{name}" for prefix, entry in entries.items() for name in entry]
    return {field: loaded.locate(field) for field in fields}
