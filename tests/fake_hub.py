"""A hub on this machine that takes models: what huggingface_hub's own client asks of one, over HTTP."""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class FakeHub:
    """What was sent to it, and how it answers."""

    url: str = ""
    token: str = "hf_of-the-test"
    role: str = "write"
    refuses_commits: bool = False
    repositories: dict[str, str | None] = field(default_factory=dict)
    """Name → `private`, `public` or as the account has it, as asked."""
    branches: list[tuple[str, str]] = field(default_factory=list)
    commits: list[tuple[str, str, dict[str, bytes]]] = field(default_factory=list)
    """(repository, revision, files)."""

    def answer(self, path: str, token: str, body: bytes) -> tuple[int, dict[str, object]]:
        parts = path.strip("/").split("/")
        if path == "/api/agent-harnesses":
            return 200, {}
        if token != f"Bearer {self.token}":
            return 401, {"error": "Invalid username or password."}
        if path == "/api/whoami-v2":
            return 200, {"type": "user", "name": "me", "orgs": [], "auth": {"accessToken": {"role": self.role}}}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            if name in self.repositories:
                return 409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"}
            self.repositories[name] = asked.get("visibility")
            return 200, {"url": f"{self.url}/{name}", "name": name}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        repository, what, revision = "/".join(parts[2:4]), parts[4], "/".join(parts[5:])
        if what == "branch":
            self.branches.append((repository, revision))
            return 200, {}
        if what == "preupload":
            files = json.loads(body)["files"]
            return 200, {"files": [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]}
        assert what == "commit", path
        if self.refuses_commits:
            return 403, {"error": "the disk of this hub is full\nand more"}
        lines = [json.loads(line) for line in body.splitlines()]
        files = {line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines if line["key"] == "file"}
        self.commits.append((repository, revision, files))
        return 200, {"commitOid": "c0ffee", "commitUrl": f"{self.url}/{repository}/commit/c0ffee", "success": True}


@contextlib.contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub that answers for the block."""
    hub = FakeHub()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

        def _answer(self) -> None:
            status, document = hub.answer(self.path.partition("?")[0], self.headers.get("authorization", ""), self._body())
            data = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _body(self) -> bytes:
            if self.headers.get("transfer-encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("content-length") or 0))
            chunks = b""
            while size := int(self.rfile.readline(), 16):
                chunks += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return chunks

        do_GET = do_POST = do_HEAD = _answer

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
