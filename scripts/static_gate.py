"""Exit code 1, with a line a finding, where the package uses a construct that this project does without.

    pickle, eval, exec, shell=True, yaml loading without a safe loader, torch.load without weights_only=True: data must never run as code.
    broad except: only at the edge (cli/) and around user code (the reward worker); elsewhere it hides faults.
    writing files: only run/atomic.py knows how to leave a file complete or absent.

Read from the syntax tree, so a name in a comment or string is no finding. `ALLOWED` lists every exception with its reason.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rloo_cli"

ALLOWED: dict[tuple[str, str], str] = {
    ("rloo_cli/run/atomic.py", "write"): "the one place that writes durably",
    ("rloo_cli/data/chat.py", "except"): "tokenizers raises plain Exception for a damaged tokenizer.json",
    ("rloo_cli/inspect/token_text.py", "except"): "tokenizers raises plain Exception for a damaged tokenizer.json",
    ("rloo_cli/rewards/calls.py", "except"): "around user code: whatever a reward function does becomes a result",
    ("rloo_cli/rewards/worker.py", "except"): "the worker's edge",
    ("rloo_cli/rollout/weight_transfer.py", "write"): "weights for the server to read at once; whole or absent, and gone with the run",
    ("rloo_cli/rewards/output.py", "write"): "what reward functions print, capped; a log that need not survive a crash",
    ("rloo_cli/rewards/worker.py", "write"): "the worker's own standard output, by descriptor",
    ("rloo_cli/rewards/python_tests_child.py", "except"): "around the code under test",
    ("rloo_cli/rewards/python_tests_child.py", "exec"): "running the completion is what this reward is for; in a child process with limits",
    ("rloo_cli/cli", "except"): "the edge: whatever happens becomes one line and an exit code",
}
"""(file, kind of finding) → why it is right there. A folder stands for all files below it."""

PICKLE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
WRITE_METHODS = {"write_text", "write_bytes"}
WRITE_CALLS = {
    "shutil.copy",
    "shutil.copy2",
    "shutil.copyfile",
    "shutil.copytree",
    "shutil.move",
    "os.rename",
    "os.replace",
    "torch.save",
    "json.dump",
    "yaml.dump_all",
    "save_file",
    "safetensors.torch.save_file",
    "pq.write_table",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A forbidden construct and where it stands."""

    file: str
    line: int
    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


def findings(source: str, file: str) -> list[Finding]:
    """Every forbidden construct of one file, in order of lines."""
    found = [
        Finding(file=file, line=line, kind=kind, what=what)
        for node in ast.walk(ast.parse(source, file))
        for line, kind, what in _check(node)
        if not _allowed(file, kind)
    ]
    return sorted(found, key=lambda finding: finding.line)


def _check(node: ast.AST) -> Iterator[tuple[int, str, str]]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        for module in modules:
            if module.split(".")[0] in PICKLE_MODULES:
                yield node.lineno, "pickle", f"import of {module}: its files run code when they are read"
    elif isinstance(node, ast.ExceptHandler) and _is_broad(node):
        yield node.lineno, "except", "broad except: name the exceptions that this place can answer"
    elif isinstance(node, ast.Call):
        yield from ((node.lineno, kind, what) for kind, what in _check_call(node))


def _check_call(call: ast.Call) -> Iterator[tuple[str, str]]:
    name = _dotted(call.func)
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if name in ("eval", "exec", "builtins.eval", "builtins.exec"):
        yield "exec", f"{name}() runs a string as code"
    if _is_true(keywords.get("shell")) or name in ("os.system", "os.popen"):
        yield "shell", f"{name}() goes through a shell: pass a list of arguments"
    if name in ("yaml.load", "yaml.load_all") and "Safe" not in ast.unparse(call):
        yield "yaml", f"{name}() without a safe loader builds any object"
    if name in ("yaml.unsafe_load", "yaml.full_load"):
        yield "yaml", f"{name}() builds any object"
    if name == "torch.load" and not _is_true(keywords.get("weights_only")):
        yield "pickle", "torch.load() without weights_only=True unpickles"
    if _writes(call, name) or (name == "os.open" and "O_CREAT" in ast.unparse(call)):
        yield "write", f"{name}() writes a file outside run/atomic.py"


def _writes(call: ast.Call, name: str) -> bool:
    method = name.rsplit(".", 1)[-1]
    if name in WRITE_CALLS or method in WRITE_METHODS:
        return True
    if method not in ("open", "fdopen") or name == "os.open":
        return False
    position = 1 if name in ("open", "io.open", "os.fdopen") else 0
    arguments = [*call.args[position : position + 1], *(k.value for k in call.keywords if k.arg == "mode")]
    return any(isinstance(a, ast.Constant) and isinstance(a.value, str) and set(a.value) & set("wax+") for a in arguments)


def _is_broad(handler: ast.ExceptHandler) -> bool:
    if isinstance(handler.body[-1], ast.Raise) and handler.body[-1].exc is None:
        return False  # tidies up and lets the exception go on
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or _dotted(kind) in ("Exception", "BaseException") for kind in kinds)


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "…"


def _allowed(file: str, kind: str) -> bool:
    return any(kind == allowed and (file == path or file.startswith(path.rstrip("/") + "/")) for path, allowed in ALLOWED)


def main() -> int:
    """The exit code, after printing what was found in the package."""
    found = [
        finding
        for path in sorted(PACKAGE.rglob("*.py"))
        for finding in findings(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    ]
    for finding in found:
        print(finding)
    print(f"static gate: {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
