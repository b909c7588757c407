from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rloo_cli"

BASE = {"recipe", "types", "errors"}
MIDDLE = {"rollout", "rewards", "data", "algorithm", "run"}
MAY_IMPORT = {
    "types": set(),
    "errors": set(),
    "recipe": {"types", "errors"},
    "rollout": BASE,
    "rewards": BASE,
    "data": BASE,
    "run": BASE,
    "algorithm": set(),
    "training": MIDDLE | BASE | {"serving"},
    "inspect": {"run", "rewards", "data"} | BASE,
    "report": {"inspect", "run"} | BASE,
    "plan": MIDDLE | BASE | {"training", "serving"},
    "launch": MIDDLE | BASE | {"training", "plan", "serving"},
    "serving": BASE | {"run", "rollout"},
    "doctor": MIDDLE | BASE | {"training", "plan", "launch", "serving"},
    "cli": MIDDLE | BASE | {"training", "plan", "launch", "inspect", "report", "serving", "doctor", "trl_import"},
    "trl_import": BASE | {"rewards", "run"},
    "api": MIDDLE | BASE | {"plan", "launch", "trl_import"},
    "__main__": {"cli"},
    "__init__": {"api"},
}
ONLY_IN = {"typer": "cli", "deepspeed": "training/strategy_zero.py", "vllm": ("rollout/vllm_", "serving/"), "peft": "training/adapter.py"}
TORCH_FREE = BASE | {"rewards", "inspect", "report", "trl_import"}
HEAVY = {"torch", "transformers", "datasets", "accelerate", "safetensors"}


def imports(path: Path) -> list[tuple[str, int, bool]]:
    """(module, line, whether at run time) of every import, also those inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for statement in block.body
        for node in ast.walk(statement)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno, id(node) not in typing_only) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" if node.module == "rloo_cli" else node.module for alias in node.names]
            found += [(name, node.lineno, id(node) not in typing_only) for name in names]
    return found


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "_recipes" not in path.parts)


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_point_to_the_right(path):
    own = package_of(path)
    wrong = []
    for module, line, _ in imports(path):
        parts = module.split(".")
        if parts[0] != "rloo_cli" or len(parts) == 1 or parts[1].startswith("__"):
            continue
        if parts[1] != own and parts[1] not in MAY_IMPORT[own]:
            wrong.append(f"{path.relative_to(ROOT)}:{line}: {own} must not import {module}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_heavy_modules_stay_in_their_place(path):
    place = path.relative_to(PACKAGE).as_posix()
    wrong = []
    for module, line, at_run_time in imports(path):
        top = module.split(".")[0]
        if top in ONLY_IN and not place.startswith(ONLY_IN[top]):
            wrong.append(f"{place}:{line}: {top} belongs to {ONLY_IN[top]}")
        if top in HEAVY and at_run_time and package_of(path) in TORCH_FREE:
            wrong.append(f"{place}:{line}: {package_of(path)} must do without {top}")
    assert not wrong, "\n".join(wrong)


def python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env={**os.environ, **environment}, cwd=ROOT, timeout=120
    )


HEAVY_AFTER_RUN = """
import sys
sys.argv = ["rloo", *sys.argv[1:]]
from rloo_cli.__main__ import main
try:
    main()
except SystemExit as exit:
    code = exit.code
print("HEAVY", code, sorted({"torch", "transformers", "datasets", "accelerate", "numpy", "pyarrow"} & set(sys.modules)))
"""


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["schema"]])
def test_help_imports_nothing_heavy(arguments):
    result = python(HEAVY_AFTER_RUN, *arguments)
    assert result.stdout.splitlines()[-1] == "HEAVY 0 []", result.stdout[-500:] + result.stderr


def test_a_wrong_recipe_is_refused_before_torch_is_imported(tmp_path):
    recipe = tmp_path / "bad.yaml"
    recipe.write_text("model:\n  model_name_or_path: x\ndata:\n  dataset_name: y\nrewards:\n  - function: no.such.module.f\n")
    for command in (["train", str(recipe)], ["plan", str(recipe)]):
        result = python(HEAVY_AFTER_RUN, *command)
        assert result.stdout.splitlines()[-1] == "HEAVY 2 []", result.stdout + result.stderr
        assert f"{recipe}:6:" in result.stderr


@pytest.mark.parametrize("module", sorted({"rloo_cli." + name for name in TORCH_FREE}))
def test_torch_free_packages_load_without_torch(module):
    result = python(f"import sys, {module}; print('torch' in sys.modules)")
    assert result.stdout == "False\n", result.stdout + result.stderr
