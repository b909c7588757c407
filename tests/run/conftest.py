from __future__ import annotations

import pytest

from rloo_cli.run import atomic


@pytest.fixture(autouse=True)
def cheap_fsync():
    """Calls to fsync are still made, counted and failed on purpose, but do not wait for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic.FileSystem, "fsync", staticmethod(lambda descriptor: None))
        yield
