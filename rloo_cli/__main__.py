"""`python -m rloo_cli` and the console script `rloo`."""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command line."""
    try:
        from rloo_cli.cli.app import run

        run()
    except KeyboardInterrupt:  # while modules are imported, before `run` answers it
        sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
