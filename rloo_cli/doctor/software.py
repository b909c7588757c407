"""Python and packages: whether they are there, are those that rloo is made for and tested with, and have no known hole."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

import rloo_cli
from rloo_cli.doctor.check import Check, judged
from rloo_cli.doctor.floors import FLOORS, Floor
from rloo_cli.run.environment import PACKAGES

OLDEST_PYTHON = (3, 11)
TESTED_PYTHON = ((3, 11), (3, 13))
EXTRAS = {"math": "math_verify", "vllm": "vllm", "deepspeed": "deepspeed", "peft": "peft"}
"""Extra → a module that it brings."""
SHOWN = 3
"""Packages that are named."""
PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)==([^\s;]+)", re.MULTILINE)
CONSTRAINTS = Path(rloo_cli.__file__).resolve().parent.parent / "constraints.txt"
"""The tested versions; in a clone alone."""


def look_at_python() -> Check:
    """The interpreter."""
    version = sys.version_info[:2]
    is_old, is_untested = version < OLDEST_PYTHON, not TESTED_PYTHON[0] <= version <= TESTED_PYTHON[1]
    tested = "tested with 3.11 to 3.13"
    return judged(
        "python",
        f"{platform.python_version()} on {platform.system()} {platform.machine()}" + (f", {tested}" if is_untested else ""),
        remedy="make an environment with Python 3.11 to 3.13",
        fails=is_old or sys.platform != "linux",
        warns=is_untested,
        version=platform.python_version(),
        executable=sys.executable,
    )


def look_at_packages(requirements: Sequence[str] | None = None, versions: Mapping[str, str] | None = None) -> Check:
    """What rloo requires against what is installed; both are looked up where they are not given."""
    try:
        requirements = metadata.requires("rloo") or [] if requirements is None else requirements
    except metadata.PackageNotFoundError:
        return judged(
            "packages",
            "rloo itself is not installed, so what it needs is not known",
            remedy='pip install -e ".[math]" in the clone',
            warns=True,
        )
    wrong = list(_wrong_packages(requirements, versions))
    there = f"torch {_installed('torch', versions)}, transformers {_installed('transformers', versions)}"
    return judged(
        "packages",
        f"{rloo_cli.__version__}, {there}: as required" if not wrong else _listed(wrong),
        remedy='pip install -c constraints.txt -e ".[math]" in a clone, else pip install --upgrade rloo',
        fails=bool(wrong),
        wrong=wrong,
    )


def _wrong_packages(requirements: Sequence[str], versions: Mapping[str, str] | None) -> Iterator[str]:
    for line in requirements:
        try:
            requirement = Requirement(line)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            found = _installed(requirement.name, versions)
            if found is None:
                yield f"{requirement.name} is missing"
            elif not requirement.specifier.contains(Version(found).public, prereleases=True):
                yield f"{requirement.name} {found} is not {requirement.specifier}"
        except (InvalidRequirement, InvalidVersion):
            continue  # of somebody else's making; pip would not have it either


def look_at_pins(constraints: Path = CONSTRAINTS, versions: Mapping[str, str] | None = None) -> Check:
    """The exact versions that this clone is tested with, of the packages that may change a result."""
    try:
        pins = {name: version for name, version in PIN.findall(constraints.read_text(encoding="utf-8")) if name in PACKAGES}
    except OSError:
        return judged("tested", "no constraints.txt here: the required ranges above are all there is to compare with")
    found = {name: _installed(name, versions) for name in pins}
    other = [f"{name} {there} (tested {pins[name]})" for name, there in found.items() if there is not None and _public(there) != pins[name]]
    said = f"{sum(there is not None for there in found.values())} packages as in constraints.txt" if not other else _listed(other)
    return judged("tested", said, remedy="pip install -c constraints.txt -e . brings the tested ones", warns=bool(other), other=other)


def look_at_floors(floors: Sequence[Floor] = FLOORS, versions: Mapping[str, str] | None = None) -> Check:
    """Known vulnerabilities of what is installed."""
    below = []
    for floor in floors:
        found = _installed(floor.package, versions)
        if found is not None and _is_below(found, floor.version):
            below.append(f"{floor.package} {found} is below {floor.version} ({floor.advisory}: {floor.because})")
    packages = " ".join(
        f"'{floor.package}>={floor.version}'" for floor in floors if any(line.startswith(f"{floor.package} ") for line in below)
    )
    said = _listed(below, "; ") if below else f"nothing below the {len(floors)} known floors"
    return judged("security", said, remedy=f"pip install {packages}", warns=bool(below), below=below)


def look_at_extras() -> Check:
    """Which optional packages are there; that one is not is no fault by itself."""
    there: dict[str, Any] = {name: find_spec(module) is not None for name, module in EXTRAS.items()}
    words = [f"{name} {'yes' if found else 'no'}" for name, found in there.items()]
    return judged("extras", ", ".join(words), **there)


def _installed(name: str, versions: Mapping[str, str] | None) -> str | None:
    if versions is not None:
        return versions.get(name)
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _public(version: str) -> str:
    """`2.13.0` of `2.13.0+cpu`."""
    return version.partition("+")[0]


def _is_below(found: str, floor: str) -> bool:
    try:
        return Version(found) < Version(floor)
    except InvalidVersion:
        return False


def _listed(lines: Sequence[str], separator: str = ", ") -> str:
    """The first ones, and how many more."""
    rest = f"{separator}and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return separator.join(lines[:SHOWN]) + rest
