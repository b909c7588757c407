"""`python -m rloo_cli` and the console script `rloo`."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from rloo_cli.cli.app import run

    run()


if __name__ == "__main__":
    main()
