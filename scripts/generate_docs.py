"""Rewrites the generated parts of docs/: tables of fields, metrics, rollout columns, exit codes and health checks.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`. `--check` writes nothing and exits 1 where a part is stale.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from memory_table import memory_rows

from rloo_cli import errors
from rloo_cli.cli.fields import SECTIONS, section_fields
from rloo_cli.doctor.floors import FLOORS
from rloo_cli.plan.comparison import BY_WEIGHT
from rloo_cli.report.health import checks_table
from rloo_cli.run.metrics import METRICS
from rloo_cli.run.rollouts import COLUMNS

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


GENERATORS: dict[str, Callable[[], str]] = {
    "fields": fields_table,
    "metrics": metrics_table,
    "rollouts": rollouts_table,
    "exit-codes": exit_codes_table,
    "memory": memory_table,
    "checks": checks_markdown,
    "floors": floors_table,
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
