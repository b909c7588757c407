"""The command that installs an extra of this package."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def install_command(extra: str, root: Path = ROOT) -> str:
    """`pip install "rloo[math]"`, or in a clone `pip install -e "/path/to/clone[math]"`, with which no index need know the package.

    Args:
        extra: of pyproject.toml, such as `math`.
        root: the folder that holds the package.
    """
    is_clone = (root / "pyproject.toml").is_file()
    return f'pip install -e "{root}[{extra}]"' if is_clone else f'pip install "rloo[{extra}]"'
