"""Exit code 1, with a line a finding, where the package uses a construct that this project does without.

    pickle     reading files or messages that run code when they are read
    exec       strings run as code; modules imported by a name that is not in the source
    shell      commands that go through a shell
    yaml       loaders that build any object
    except     handlers that hide whatever happens: only at the edge (cli/) and around user code (the reward worker)
    write      files written, moved or removed anywhere but in run/atomic.py, which knows how to leave them complete or absent
    network    sockets and HTTP outside the places that speak to somebody
    process    children outside the places that start them

Read from the syntax tree, so a name in a comment or string is no finding. Names are followed through imports (`from os import system as
s`), through assignments of names (`run = os.system`), `getattr` with a literal and imports by a literal; a forbidden function counts
wherever it is mentioned, called or not. Not followed: names put together at run time (`getattr(os, "sys" + "tem")`), containers,
parameters, what a library does inside, and methods of values that only look like another's (`write_text`, `unlink`, … of anything count
as a path's). It guards against carelessness, not against an author who wants to deceive it.

`ALLOWED` lists every exception with its reason.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rloo_cli"

ALLOWED: dict[tuple[str, str], str] = {
    ("rloo_cli/api/inputs.py", "write"): "libraries write data and model below a folder of run/atomic.py's",
    ("rloo_cli/cli", "except"): "the edge: whatever happens becomes one line and an exit code",
    ("rloo_cli/cli/failures.py", "write"): "the traceback of a bug outside any run, in the folder for temporary files",
    ("rloo_cli/data/chat.py", "except"): "tokenizers raises plain Exception for a damaged tokenizer.json",
    ("rloo_cli/data/hub.py", "network"): "asks whether the hub answers; downloads are the libraries'",
    ("rloo_cli/data/rendering.py", "process"): "chat templates are rendered in a child that can be killed",
    ("rloo_cli/doctor/machine.py", "network"): "looks whether ports are free",
    ("rloo_cli/doctor/torch_probe.py", "network"): "looks for a free port",
    ("rloo_cli/doctor/torch_probe.py", "process"): "two processes that import torch and try to meet",
    ("rloo_cli/inspect/reward_check.py", "write"): "a folder for temporary files, gone with the check",
    ("rloo_cli/launch/trial.py", "write"): "a temporary log, gone with a look that succeeds",
    ("rloo_cli/training/measure.py", "write"): "asks the kernel to forget the peak of this process's memory",
    ("rloo_cli/rollout/vllm_build.py", "write"): "a folder for a temporary file of vLLM's, gone with the engine",
    ("rloo_cli/inspect/token_text.py", "except"): "tokenizers raises plain Exception for a damaged tokenizer.json",
    ("rloo_cli/rewards/__init__.py", "exec"): "built-in rewards, imported when they are named: the names are in a table",
    ("rloo_cli/launch/endings.py", "network"): "the name of this machine",
    ("rloo_cli/launch/processes.py", "network"): "looks for a free port",
    ("rloo_cli/launch/shared_folder.py", "network"): "the name of this machine",
    ("rloo_cli/launch/interface.py", "network"): "asks by which interface a machine is reached",
    ("rloo_cli/launch/local_ranks.py", "process"): "starts the processes that train together",
    ("rloo_cli/launch/local_ranks.py", "write"): "what libraries print in a rank goes to the end of its log",
    ("rloo_cli/launch/machines.py", "network"): "the name of this machine",
    ("rloo_cli/launch/meeting.py", "network"): "launchers of several machines meet in a store",
    ("rloo_cli/launch/rank.py", "except"): "a rank's edge: whatever happens is in its report, and an exit code",
    ("rloo_cli/launch/slurm_attempt.py", "process"): "starts the steps of a SLURM job",
    ("rloo_cli/launch/slurm_job.py", "process"): "asks SLURM, with a deadline",
    ("rloo_cli/launch/slurm_port.py", "network"): "looks for a free port",
    ("rloo_cli/launch/report.py", "process"): "the page about a run is made by a child with a deadline: nothing of it can end the run",
    ("rloo_cli/rewards/calls.py", "except"): "around user code: whatever a reward function does becomes a result",
    ("rloo_cli/rewards/calls.py", "exec"): "imports the reward functions that a recipe names, in a worker",
    ("rloo_cli/rewards/dispatch.py", "write"): "replaces a worker, not a file",
    ("rloo_cli/rewards/forkserver.py", "network"): "a socket pair to the trainer",
    ("rloo_cli/rewards/forkserver.py", "process"): "workers are its forks",
    ("rloo_cli/rewards/math_judge.py", "process"): "answers are parsed in a child that can be killed",
    ("rloo_cli/rewards/math_process.py", "process"): "answers are parsed in a child that can be killed",
    ("rloo_cli/rewards/output.py", "write"): "what reward functions print, capped; a log that need not survive a crash",
    ("rloo_cli/rewards/parameters.py", "exec"): "imports built-in rewards by the names of a table",
    ("rloo_cli/rewards/pool.py", "network"): "socket pairs to the workers",
    ("rloo_cli/rewards/processes.py", "write"): "tells the kernel whom to kill first when memory runs out",
    ("rloo_cli/rewards/protocol.py", "network"): "messages over a socket pair",
    ("rloo_cli/rewards/python_tests.py", "process"): "the code under test runs in a child with limits",
    ("rloo_cli/rewards/python_tests.py", "write"): "the folder that the code under test runs in, gone afterwards",
    ("rloo_cli/rewards/python_tests_child.py", "except"): "around the code under test",
    ("rloo_cli/rewards/python_tests_child.py", "exec"): "running the completion is what this reward is for; in a child process with limits",
    ("rloo_cli/rewards/python_tests_child.py", "process"): "a fork for each test",
    ("rloo_cli/rewards/python_tests_child.py", "write"): "the folder that the code under test runs in, gone afterwards",
    ("rloo_cli/rewards/runner.py", "write"): "makes the folder of the workers' logs",
    ("rloo_cli/rewards/server.py", "network"): "a socket pair to the process that forks workers",
    ("rloo_cli/rewards/server.py", "process"): "starts the process that forks workers",
    ("rloo_cli/rewards/worker.py", "except"): "the worker's edge",
    ("rloo_cli/rewards/worker.py", "network"): "a socket pair to the trainer",
    ("rloo_cli/rollout/server_client.py", "network"): "the client of the vLLM server",
    ("rloo_cli/rollout/server_handshake.py", "network"): "the names of this machine, for the server to compare",
    ("rloo_cli/rollout/weight_group.py", "network"): "finds the address that the server can reach",
    ("rloo_cli/rollout/weight_transfer.py", "network"): "weights go to the vLLM server",
    ("rloo_cli/rollout/weight_file.py", "write"): "weights for the server to read at once; whole or absent, and gone with the run",
    ("rloo_cli/run/atomic.py", "write"): "the one place that writes durably",
    ("rloo_cli/run/environment.py", "network"): "the name of this machine",
    ("rloo_cli/run/environment.py", "process"): "asks git and nvidia-smi, with a deadline",
    ("rloo_cli/run/lock.py", "network"): "the name of this machine",
    (
        "rloo_cli/run/ranks.py",
        "pickle",
    ): "messages between the ranks of one run, over torch.distributed, which docs/security.md calls unauthenticated",
    ("rloo_cli/run/rollouts.py", "write"): "into a buffer; atomic.py writes it",
    ("rloo_cli/run/signals.py", "network"): "a socket pair that wakes waits up when a signal comes",
    ("rloo_cli/serving", "network"): "the vLLM server's front",
    ("rloo_cli/serving", "process"): "the vLLM server itself",
    ("rloo_cli/serving/serve.py", "write"): "the server's scratch folder, gone with it",
    ("rloo_cli/training/engines.py", "network"): "the name of this machine",
    ("rloo_cli/training/final_model.py", "write"): "transformers writes into a folder that atomic.py makes durable and renames",
    ("rloo_cli/training/model_files.py", "write"): "transformers writes into a folder that atomic.py makes durable and renames",
}
"""(file, kind of finding) → why it is right there. A folder stands for all files below it."""

PICKLE_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "multiprocessing"}
NETWORK_MODULES = {
    *(
        "socket",
        "_socket",
        "socketserver",
        "ssl",
        "http.client",
        "http.server",
        "urllib.request",
        "ftplib",
        "smtplib",
        "telnetlib",
        "xmlrpc",
    ),
    *("urllib3", "requests", "httpx", "httpx2", "httpcore", "aiohttp", "websockets", "zmq", "paramiko", "grpc", "uvicorn"),
}
PROCESS_MODULES = {"subprocess", "_posixsubprocess", "pty"}

EXEC = {"eval", "exec", "compile", "execfile", "runpy.run_path", "runpy.run_module", "code.interact", "types.FunctionType"}
IMPORTS = {"__import__", "importlib.import_module", "importlib.util.spec_from_file_location", "importlib.util.module_from_spec"}
SHELL = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell"}
PICKLE = {"pandas.read_pickle", "numpy.lib.format.read_array", "torch.hub.load", "torch.serialization.add_safe_globals"}
OBJECT_COLLECTIVES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
YAML = {f"yaml.{name}" for name in ("unsafe_load", "unsafe_load_all", "full_load", "full_load_all", "Loader", "UnsafeLoader", "FullLoader")}
SAFE_LOADERS = {"yaml.SafeLoader", "yaml.CSafeLoader", "yaml.BaseLoader", "yaml.CBaseLoader"}
NETWORK = {"asyncio.open_connection", "asyncio.start_server", "huggingface_hub.get_session", "torch.hub.download_url_to_file"}
PROCESS = {"os.fork", "os.forkpty", "asyncio.create_subprocess_exec", "os.startfile"}
PROCESS_PREFIXES = ("os.exec", "os.spawn", "os.posix_spawn")

OS_WRITES = {
    f"os.{name}"
    for name in (
        *("rename", "renames", "replace", "remove", "unlink", "mkdir", "makedirs", "rmdir", "removedirs", "link", "symlink", "truncate"),
        *("ftruncate", "chmod", "fchmod", "chown", "mkfifo", "mknod", "utime", "setxattr"),
    )
}
SHUTIL_READS = {"shutil.disk_usage", "shutil.which", "shutil.get_terminal_size"}
WRITES = {
    *(
        "torch.save",
        "json.dump",
        "numpy.save",
        "numpy.savez",
        "numpy.savetxt",
        "safetensors.torch.save_file",
        "safetensors.numpy.save_file",
    ),
    *("pyarrow.parquet.write_table", "pyarrow.parquet.ParquetWriter", "pyarrow.OSFile", "sqlite3.connect"),
}
WRITE_METHODS = {
    *("write_text", "write_bytes", "touch", "unlink", "rmdir", "mkdir", "rename", "symlink_to", "hardlink_to", "chmod", "lchmod", "tofile"),
    *("extractall", "save_pretrained", "save_to_disk", "to_parquet", "to_csv", "to_json", "to_pickle", "push_to_hub"),
}
ATOMIC = "rloo_cli.run.atomic."
OPENERS = {"open": 1, "io.open": 1, "os.fdopen": 1, "codecs.open": 1, "gzip.open": 1, "bz2.open": 1, "lzma.open": 1}
"""Function → position of its mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A forbidden construct and where it stands."""

    file: str
    line: int
    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind}: {self.what}"


def findings(source: str, file: str) -> list[Finding]:
    """Every forbidden construct of one file that `ALLOWED` does not allow there, one a line and kind, in order of lines."""
    found: dict[tuple[int, str], Finding] = {}
    for line, kind, what in _Source(ast.parse(source, file)).constructs():
        if not _allowed(file, kind):
            found.setdefault((line, kind), Finding(file=file, line=line, kind=kind, what=what))
    return sorted(found.values(), key=lambda finding: (finding.line, finding.kind))


@dataclass(slots=True)
class _Source:
    """The tree of a file and what its names stand for."""

    tree: ast.Module
    names: dict[str, set[str]] = field(default_factory=dict)
    """Name → dotted names that it stands for anywhere in the file."""

    def __post_init__(self) -> None:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._bind(alias.asname or alias.name.split(".")[0], alias.name if alias.asname else alias.name.split(".")[0])
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self._bind(alias.asname or alias.name, f"{node.module or ''}.{alias.name}".lstrip("."))
        for _ in range(2):  # a = os; b = a.system
            for node in ast.walk(self.tree):
                if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    for target in targets:
                        self._assign(target, node.value)

    def _bind(self, name: str, meaning: str) -> None:
        self.names.setdefault(name, set()).add(meaning)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        root = value
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(target, ast.Name):
            return
        for meaning in self.meanings(value):
            is_imported = isinstance(root, ast.Call) or (isinstance(root, ast.Name) and root.id in self.names)
            if is_imported or meaning in EXEC | IMPORTS | {"open"}:
                self._bind(target.id, meaning)

    def meanings(self, node: ast.expr) -> set[str]:
        """The dotted names that an expression stands for; empty where it is none."""
        if isinstance(node, ast.Name):
            return {name.removeprefix("builtins.") for name in self.names.get(node.id, {node.id})}
        if isinstance(node, ast.Attribute):
            return {f"{name}.{node.attr}".removeprefix("builtins.") for name in self.meanings(node.value) or {"…"}}
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[-1], ast.Constant) and isinstance(node.args[-1].value, str):
            called, text = self.meanings(node.func), node.args[-1].value
            if "getattr" in called and len(node.args) == 2:
                return {f"{name}.{text}".removeprefix("builtins.") for name in self.meanings(node.args[0])}
            if called & {"__import__", "importlib.import_module"}:
                return {text}
        return set()

    def constructs(self) -> Iterator[tuple[int, str, str]]:
        """(line, kind, what) of everything that is forbidden somewhere."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield from ((node.lineno, kind, what) for module in _modules(node) for kind, what in _of_module(module))
            elif isinstance(node, ast.ExceptHandler) and self._is_broad(node):
                yield node.lineno, "except", "broad except: name the exceptions that this place can answer"
            elif isinstance(node, ast.Call):
                yield from ((node.lineno, kind, what) for kind, what in self._of_call(node))
            if isinstance(node, ast.Name | ast.Attribute | ast.Call) and not isinstance(getattr(node, "ctx", None), ast.Store):
                yield from ((node.lineno, kind, what) for name in self.meanings(node) for kind, what in _of_name(name))

    def _of_call(self, call: ast.Call) -> Iterator[tuple[str, str]]:
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        if "shell" in keywords and not _is_constant(keywords["shell"], False):
            yield "shell", "shell=True goes through a shell: pass a list of arguments"
        for name in self.meanings(call.func) or {"…"}:
            if name in ("yaml.load", "yaml.load_all") and not self._is_safe(keywords.get("Loader") or (call.args[1:] or [None])[0]):
                yield "yaml", f"{name}() without a safe loader builds any object"
            if name == "torch.load" and not _is_constant(keywords.get("weights_only"), True):
                yield "pickle", "torch.load() without weights_only=True unpickles"
            if name == "numpy.load" and not _is_constant(keywords.get("allow_pickle", ast.Constant(False)), False):
                yield "pickle", "numpy.load() with allow_pickle unpickles"
            if name == "contextlib.suppress" and any(self.meanings(kind) & {"Exception", "BaseException"} for kind in call.args):
                yield "except", "suppress(Exception) hides whatever happens"
            if self._writes(call, name, keywords):
                yield "write", f"{ast.unparse(call.func)}() writes outside run/atomic.py"

    def _writes(self, call: ast.Call, name: str, keywords: dict[str | None, ast.expr]) -> bool:
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if name.startswith(ATOMIC):
            return False
        if method in WRITE_METHODS:
            return True
        if method == "replace" and len(call.args) == 1 and not call.keywords and not name.startswith("dataclasses."):
            return True  # a path's; that of a text takes two
        if name == "os.open":
            flags = ast.unparse(call.args[1]) if len(call.args) > 1 else ""
            is_null = bool(call.args) and "os.devnull" in self.meanings(call.args[0])
            return not is_null and any(flag in flags for flag in ("O_CREAT", "O_WRONLY", "O_RDWR", "O_TRUNC", "O_APPEND"))
        if name in OPENERS:
            return _may_write(keywords.get("mode") or (call.args[OPENERS[name] :] or [None])[0])
        return method == "open" and name.split(".")[0] not in self.names and _may_write(keywords.get("mode") or (call.args or [None])[0])

    def _is_safe(self, loader: ast.expr | None) -> bool:
        return loader is not None and bool(self.meanings(loader)) and self.meanings(loader) <= SAFE_LOADERS

    def _is_broad(self, handler: ast.ExceptHandler) -> bool:
        if isinstance(handler.body[-1], ast.Raise) and handler.body[-1].exc is None:
            return False  # tidies up and lets the exception go on
        kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        return any(kind is None or self.meanings(kind) & {"Exception", "BaseException"} for kind in kinds)


def _modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)] if not node.level else []


def _of_module(module: str) -> Iterator[tuple[str, str]]:
    parents = {module[:end] for end in (*(i for i, c in enumerate(module) if c == "."), len(module))}
    if parents & PICKLE_MODULES:
        yield "pickle", f"{module}: what it reads runs code"
    if parents & NETWORK_MODULES:
        yield "network", f"{module}: speaks to other machines"
    if parents & PROCESS_MODULES:
        yield "process", f"{module}: starts processes"


def _of_name(name: str) -> Iterator[tuple[str, str]]:
    """What a mention of this name is a case of."""
    if name in EXEC:
        yield "exec", f"{name} runs a string as code"
    if name in IMPORTS:
        yield "exec", f"{name} imports what is not named in the source"
    if name in SHELL:
        yield "shell", f"{name} goes through a shell: pass a list of arguments"
    if name in PICKLE or name.rpartition(".")[2] in OBJECT_COLLECTIVES:
        yield "pickle", f"{name} unpickles"
    if name in YAML:
        yield "yaml", f"{name} builds any object"
    if name in OS_WRITES | WRITES or (name.startswith(("shutil.", "tempfile.")) and name not in SHUTIL_READS | {"tempfile.gettempdir"}):
        yield "write", f"{name} writes outside run/atomic.py"
    if name in NETWORK:
        yield "network", f"{name} speaks to other machines"
    if name in PROCESS or name.startswith(PROCESS_PREFIXES):
        yield "process", f"{name} starts a process"


def _may_write(mode: ast.expr | None) -> bool:
    """Whether a file opened in this mode may be written: not where the mode is left out or says so."""
    if mode is None:
        return False
    return not isinstance(mode, ast.Constant) or (isinstance(mode.value, str) and bool(set(mode.value) & set("wax+")))


def _is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _allowed(file: str, kind: str) -> bool:
    return any(kind == allowed and (file == path or file.startswith(path.rstrip("/") + "/")) for path, allowed in ALLOWED)


def unused() -> list[str]:
    """The exceptions that nothing needs any more."""
    needed = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        kinds = {kind for _, kind, _ in _Source(ast.parse(path.read_text(encoding="utf-8"), file)).constructs()}
        needed |= {(place, kind) for place, kind in ALLOWED if kind in kinds and (file == place or file.startswith(place + "/"))}
    return [f"{place}: {kind}" for place, kind in ALLOWED if (place, kind) not in needed]


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
