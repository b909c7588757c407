"""Rewrites the generated parts of docs/: tables of fields, metrics, rollout columns, exit codes and health checks.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`. `--check` writes nothing and exits 1 where a part is stale.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from memory_table import memory_rows

from rloo_cli import errors
from rloo_cli.cli.fields import SECTIONS, section_fields
from rloo_cli.doctor.floors import FLOORS
from rloo_cli.plan.comparison import BY_WEIGHT
from rloo_cli.recipe.trl_keys import OTHER_KEYS, TRL_KEYS, Treatment, TrlKey
from rloo_cli.report.health import checks_table
from rloo_cli.run.metrics import METRICS
from rloo_cli.run.rollouts import COLUMNS
from rloo_cli.trl_import.differences import MEANINGS, METRIC_NAMES, default_rows

CVE_RECORD = "https://www.cve.org/CVERecord?id="
ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PART = re.compile(r"(?P<head><!-- generated: (?P<name>[a-z-]+) -->\n).*?(?P<tail><!-- end -->)", re.DOTALL)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def fields_table() -> str:
    """Every section of the recipe with its fields."""
    parts = []
    for section, model in SECTIONS.items():
        rows = [(f"`{row.name}`", row.type, f"`{row.default}`", row.description) for row in section_fields(section)]
        title = "Each entry of `rewards`" if section == "rewards" else f"`{section}`"
        parts.append(f"### {title}\n\n{model.__doc__}\n\n" + table(("field", "type", "default", "meaning"), rows))
    return "\n".join(parts)


def metrics_table() -> str:
    """Every key of metrics.jsonl."""
    return table(("key", "unit", "meaning"), ((f"`{key}`", metric.unit, metric.description) for key, metric in METRICS.items()))


def rollouts_table() -> str:
    """Every column of a rollout file."""
    return table(("column", "type", "meaning"), ((f"`{name}`", kind, meaning) for name, (kind, meaning) in COLUMNS.items()))


def exit_codes_table() -> str:
    """Every error class with its exit code."""
    kinds = sorted(errors.RlooError.__subclasses__(), key=lambda kind: (kind.exit_code, kind.__name__))
    rows = [("0", "done"), ("1", "a fault in rloo itself: please report it")]
    rows += [(str(kind.exit_code), (kind.__doc__ or "").splitlines()[0]) for kind in kinds]
    return table(("code", "meaning"), rows)


def checks_markdown() -> str:
    """Every health check of a report with its limits."""
    return table(("trouble", "what is measured", "note", "warning", "what it means, what to try"), checks_table())


def memory_table() -> str:
    """GiB of each GPU by model, number of GPUs, sampler and strategy."""
    return table(("model", "GPUs", "sampling", *BY_WEIGHT), memory_rows())


def floors_table() -> str:
    """Every version below which `rloo doctor` warns."""
    rows = ((f"`{f.package}`", f.version, f"[{f.advisory}]({CVE_RECORD}{f.advisory})", f.because) for f in FLOORS)
    return table(("package", "from", "advisory", "what the fault does"), rows)


def exactness_tables() -> str:
    """What `benchmarks/exactness.py` finds."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from exactness import HEADER, tables

    return "\n".join(f"**{title}**\n\n{table(HEADER, rows)}" for title, rows in tables().items())


def trl_meanings_table() -> str:
    """Every difference in meaning from TRL."""
    return table(("", "TRL", "here"), ((meaning.what, meaning.trl, meaning.here) for meaning in MEANINGS))


def trl_defaults_table() -> str:
    """Every default that comes to something else than TRL's."""
    return table(
        ("field", "TRL", "here", ""), ((f"`{name}`", f"`{theirs}`", f"`{ours}`", why) for name, theirs, ours, why in default_rows())
    )


def trl_metrics_table() -> str:
    """TRL's metrics by their names here."""
    return table(("TRL", "here", "meaning"), ((f"`{name}`", f"`{ours}`", said) for name, (ours, said) in METRIC_NAMES.items()))


def trl_keys_table(keys: Mapping[str, TrlKey]) -> str:
    """What happens to each key."""
    rows = ((f"`{name}`", f"`{json.dumps(key.default)}`", _treated(key), key.because) for name, key in sorted(keys.items()))
    return table(("key", "TRL's default", "", ""), rows)


def _treated(key: TrlKey) -> str:
    words = "not in this version" if key.treatment is Treatment.LATER else str(key.treatment)
    return f"{words}, with `{key.needs}`" if key.needs else words


GENERATORS: dict[str, Callable[[], str]] = {
    "fields": fields_table,
    "metrics": metrics_table,
    "rollouts": rollouts_table,
    "exit-codes": exit_codes_table,
    "memory": memory_table,
    "checks": checks_markdown,
    "floors": floors_table,
    "trl-meanings": trl_meanings_table,
    "trl-defaults": trl_defaults_table,
    "trl-metrics": trl_metrics_table,
    "trl-keys": lambda: trl_keys_table(TRL_KEYS),
    "trl-other-keys": lambda: trl_keys_table(OTHER_KEYS),
    "exactness": exactness_tables,
}


def regenerated(text: str) -> str:
    """A page with its generated parts made anew."""
    return PART.sub(lambda match: f"{match['head']}{GENERATORS[match['name']]()}{match['tail']}", text)


def main(check: bool) -> int:
    """The exit code, after rewriting (or only naming) the stale pages."""
    stale = [
        page for page in sorted(DOCS.glob("*.md")) if regenerated(page.read_text(encoding="utf-8")) != page.read_text(encoding="utf-8")
    ]
    for page in stale:
        print(f"{page.name}: {'stale' if check else 'rewritten'}")
        if not check:
            page.write_text(regenerated(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
