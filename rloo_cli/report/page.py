"""The page: everything that was found out about the runs, laid into `page.html.j2`. No text of a run becomes markup or script."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from rloo_cli import __version__
from rloo_cli.inspect.series import smoothing_width
from rloo_cli.report.curves import Drawing, draw
from rloo_cli.report.health import Finding, examine
from rloo_cli.report.panels import Panel, make_panels
from rloo_cli.report.run_view import RunView
from rloo_cli.report.sample import BUDGET, IMAGE_BUDGET, Album, Sample, rounded, sample_rollouts
from rloo_cli.report.settings import environment_settings, recipe_settings
from rloo_cli.report.verdict import figures, verdict
from rloo_cli.run.visible import visible

MOST_DATA = 3_000_000
"""Bytes of the packed data, of which base64 makes a third more; where they are more, the sample of rollouts is made smaller: fewer images first."""
UNITS_UNSAID = ("reward", "share", "loss", "norm", "rate", "its own")
"""Units that say no more than the key."""


def render(views: Sequence[RunView], *, now: datetime) -> str:
    """The page of these runs."""
    panels = make_panels(views)
    drawings = [draw(panel) for panel in panels.drawn]
    curves = [_hover(panel, drawing) for panel, drawing in zip(panels.drawn, drawings, strict=True)]
    samples, data = _packed(views, curves)
    runs = [_run(view, sample, examine(view)) for view, sample in zip(views, samples, strict=True)]
    script = Markup(_asset("page.js"))  # noqa: S704 - ours
    return _template().render(
        runs=runs,
        title=f"{', '.join(run['name'] for run in runs)} · rloo report",
        when=f"{now:%Y-%m-%d %H:%M}",
        version=__version__,
        policy=_policy(script),
        style=Markup(_asset("page.css")),  # noqa: S704 - ours
        script=script,
        data=data,
        panels=[_panel(panel, drawing, len(views)) for panel, drawing in zip(panels.drawn, drawings, strict=True)],
        constants=panels.constants,
        smoothing=_smoothing(views),
        comparison_names=list(dict.fromkeys(name for run in runs for name, _ in run["figures"])),
        has_rollouts=any(sample.steps for sample in samples),
        recipe=recipe_settings(views),
        environment=environment_settings(views),
        names_of_runs=[run["name"] for run in runs],
    )


def _run(view: RunView, sample: Sample, findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "name": visible(view.name),
        "state": view.state,
        "model": view.recipe.model.model_name_or_path if view.recipe is not None else "",
        "verdict": verdict(view, findings),
        "figures": figures(view),
        "findings": findings,
        "gaps": [*view.gaps, *sample.gaps],
        "special": sample.special_tokens,
        "rollouts": visible(str(view.folder.rollouts)),
    }


def _panel(panel: Panel, drawing: Drawing, runs: int) -> dict[str, Any]:
    return {
        "title": panel.title,
        "meaning": panel.meaning,
        "unit": "" if panel.unit in UNITS_UNSAID else panel.unit,
        "summary": panel.summary,
        "svg": Markup(drawing.svg),  # noqa: S704 - numbers alone
        "legend": panel.lines if runs == 1 and len(panel.lines) > 1 else (),
    }


def _hover(panel: Panel, drawing: Drawing) -> dict[str, Any]:
    """What the script shows beside the pointer."""
    low, high = drawing.x_limits
    lines = [
        {
            "label": visible(line.label),
            "color": line.color,
            "style": line.style,
            "x": [rounded(step) for step in line.series.steps],
            "y": [rounded(value) for value in line.series.values],
        }
        for line in panel.lines
    ]
    return {"low": low, "high": high, "left": drawing.left, "right": drawing.right, "lines": lines}


def _packed(views: Sequence[RunView], curves: Sequence[Mapping[str, Any]]) -> tuple[list[Sample], str]:
    """Samples of the runs, and all of the page's data as base64 of gzipped JSON."""
    budget, image_budget, album = BUDGET, IMAGE_BUDGET, Album()
    while True:
        samples = [
            sample_rollouts(view, budget=budget // len(views), image_budget=image_budget // len(views), album=album) for view in views
        ]
        runs = [
            {"name": visible(view.name), "steps": sample.steps, "special": sample.special_tokens}
            for view, sample in zip(views, samples, strict=True)
        ]
        text = json.dumps({"panels": curves, "runs": runs}, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        data = gzip.compress(text.encode(), compresslevel=9, mtime=0)
        if len(data) <= MOST_DATA or budget < BUDGET // 100:
            return samples, base64.b64encode(data).decode()
        if image_budget and any("im" in group for sample in samples for step in sample.steps for group in step["groups"]):
            image_budget = image_budget // 2 if image_budget > IMAGE_BUDGET // 8 else 0
        else:
            budget //= 2


def _smoothing(views: Sequence[RunView]) -> str:
    widths = sorted({smoothing_width(len(view.metrics.train)) for view in views})
    if widths == [1] or not any(view.metrics.train for view in views):
        return ""
    steps = "–".join(map(str, dict.fromkeys((widths[0], widths[-1]))))
    return f"Thin: each step; thick: the mean over {steps} steps around it. The figures beside a name are means of the first and the last tenth."


def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"visible": lambda text: visible(str(text)), "code": _code}
    return environment.from_string(_asset("page.html.j2"))


def _code(text: str) -> Markup:
    """The text with what stands in backquotes as code."""
    parts = re.split(r"`([^`]*)`", text)
    return Markup("").join(Markup("<code>{}</code>").format(part) if i % 2 else part for i, part in enumerate(parts))


def _policy(script: str) -> str:
    """The Content-Security-Policy: this script alone runs, and nothing is loaded."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    )


def _asset(name: str) -> str:
    return (resources.files("rloo_cli.report") / name).read_text(encoding="utf-8")
