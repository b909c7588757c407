"""A checkpoint whose documents are not what this version writes, behind right hashes: one line, exit code 6."""

import json

import pytest
import test_run

from rloo_cli.errors import StoppedError, StorageError
from rloo_cli.run.checkpoint import find_checkpoint
from rloo_cli.run.manifest import MANIFEST_NAME, Manifest, digest_file

REUSED = {"training__steps_per_generation": 2}
STRANGE = {
    "experience": [[], {}, {"step": 3, "groups": [{}], "rewards": []}, {"step": 3, "groups": 1, "rewards": []}],
    "optimizer": [[], {}, {"scalars": {}, "param_groups": 3, "schedule": {}}, {"scalars": {"step/x": {"dtype": "no"}}}],
    "metrics": [[], {}, {"offset": None}],
    "random": [[], {}, {"python": {}, "numpy": {}}],
}


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    with pytest.raises(StoppedError):
        test_run.start(tmp_path / "run", monkeypatch, stop_at=3, **REUSED)
    return tmp_path / "run"


def put(folder, name, document):
    """Another document in a checkpoint, which its manifest knows of."""
    file = folder / f"{name}.json"
    file.write_text(json.dumps(document))
    manifest = Manifest.read(folder)
    whole = Manifest(info=manifest.info, files={**manifest.files, file.name: digest_file(file)})
    (folder / MANIFEST_NAME).write_bytes(whole.to_bytes())


@pytest.mark.parametrize("name", STRANGE)
def test_a_strange_document_is_told_in_one_line(name, stopped, monkeypatch):
    for document in STRANGE[name]:
        put(stopped / "checkpoints" / "000003", name, document)
        checkpoint = find_checkpoint(stopped / "checkpoints")
        with pytest.raises(StorageError, match=rf"000003 cannot be used: {name}\.json does not hold") as raised:
            test_run.start(stopped, monkeypatch, resume=checkpoint, **REUSED)
        assert "\n" not in raised.value.message
