from __future__ import annotations

import pytest

from rloo_cli.report import page
from rloo_cli.report.curves import Drawing


@pytest.fixture
def undrawn(monkeypatch):
    """Pages whose pictures are empty, for tests that are about something else."""
    monkeypatch.setattr(page, "draw", lambda panel: Drawing(svg="<svg></svg>", x_limits=(0.0, 1.0)))
