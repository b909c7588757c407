"""`python server_keeper.py FOLDER MODEL PORT`: `rloo vllm-serve`, started again whenever it dies; SIGTERM ends both.

FOLDER/pause says how many seconds after its death (-1 = never), FOLDER/keeper.json which processes are the server, once it is ready.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from served import SMALL_CACHE, serving


def main():
    folder, model, port = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    starts = 0
    while True:
        started = time.monotonic()
        with serving(folder, model, port=port, passed_on=(*SMALL_CACHE, "--load-format", "dummy")) as server:
            server.wait_until_ready()
            starts += 1
            family = server.family()
            engine = next(member.pid for member in family if "EngineCore" in " ".join(member.cmdline()) or "EngineCore" in member.name())
            say(folder, pids=[member.pid for member in family], engine=engine, starts=starts, seconds=time.monotonic() - started)
            server.process.wait()
        wait_for_leave(folder)


def wait_for_leave(folder):
    died = time.monotonic()
    while (pause := float((folder / "pause").read_text())) < 0 or time.monotonic() - died < pause:
        time.sleep(0.05)


def say(folder, **document):
    (folder / "keeper.new").write_text(json.dumps(document))
    (folder / "keeper.new").rename(folder / "keeper.json")


if __name__ == "__main__":
    main()
