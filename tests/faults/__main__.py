"""`python -m tests.faults [A B1 …]`: run rows of the fault scorecard and print what they earn. Exit code 1 below 97 %."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "run")]
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "GOMP_SPINCOUNT": "1000",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
}

import bench  # noqa: E402
import card  # noqa: E402

WANTED = 0.97
"""The share of the points that the card promises."""


def main() -> int:
    """Run, print, and say by the exit code whether the promise is kept."""
    arguments = parse()
    faults = card.chosen(arguments.rows, quick=arguments.quick)
    if arguments.markdown:
        results = card.from_json(arguments.json.read_text()) if arguments.json else []
        print(card.markdown(faults, results), end="")
        return 0
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that what was begun is cleaned up
    results = []
    with bench.Workshop(kills=arguments.kills) as workshop:
        for entry in faults:
            results.append(card.run_row(entry, workshop.bench))
            print(card.line(results[-1]), flush=True)
    print(card.summary(results))
    if arguments.json:
        arguments.json.write_text(card.to_json(results))
    return 0 if sum(result.points for result in results) >= WANTED * len(card.POINTS) * len(results) else 1


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="ids or groups: A, B1")
    parser.add_argument("--quick", action="store_true", help="the third that the default test suite runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there (with --markdown: read them)")
    parser.add_argument("--markdown", action="store_true", help="print the table for docs/reliability.md, and run nothing")
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="how many random moments A2 kills the run at (default 20)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
