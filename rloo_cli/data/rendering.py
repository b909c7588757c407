"""Renders many conversations by a chat template, in a child process that a hostile template cannot outlive."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rloo_cli.types import Message

CHILD = Path(__file__).with_name("render_child.py")
RENDER_SECONDS = 3.0
"""CPU seconds that one conversation may take; an ordinary one takes a tenth of a millisecond, one of 10 MB less than a second."""
RENDER_BYTES = 2 * 2**30
"""Address space of the child."""


@dataclass(frozen=True, slots=True)
class RenderFailure:
    """Why a conversation was not rendered, in one line."""

    reason: str
    is_fatal: bool = False
    """The child ended: what follows was not tried."""


def render_conversations(
    conversations: Iterable[Sequence[Message]],
    *,
    template: str,
    variables: Mapping[str, Any],
    seconds: float = RENDER_SECONDS,
    are_whole: bool = False,
) -> Iterator[str | RenderFailure]:
    """The text of each conversation, in order, as `apply_chat_template(tokenize=False)` gives it.

    A conversation that ends with an assistant message is left open for the model to go on with that message; any other
    is followed by the template's generation prompt. `variables` are the template's further names (special tokens,
    chat_template_kwargs), JSON-able. `are_whole`: all of a conversation is there, and no answer is asked for.
    """
    setup = {"template": template, "variables": dict(variables), "seconds": seconds, "bytes": RENDER_BYTES}
    child = _start_child()
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    feeder = threading.Thread(target=_feed, args=(child.stdin, setup, conversations, are_whole), daemon=True)
    feeder.start()
    try:
        for line in child.stdout:
            answer = json.loads(line)
            yield answer["text"] if "text" in answer else RenderFailure(answer["error"])
        if child.wait() != 0:
            yield RenderFailure(_cause(child.returncode, child.stderr.read(), seconds), is_fatal=True)
    finally:
        child.kill()
        child.wait()
        feeder.join()
        child.stdout.close()
        child.stderr.close()


def _start_child() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", str(CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        start_new_session=True,  # a Ctrl-C is for the trainer to answer; the child ends with its standard input
    )


def _feed(pipe: IO[str], setup: Mapping[str, Any], conversations: Iterable[Sequence[Message]], are_whole: bool) -> None:
    """Send everything; a child that has gone is found by the reader."""
    with contextlib.suppress(BrokenPipeError), pipe:
        pipe.write(json.dumps(setup) + "\n")
        for messages in conversations:
            request = {"messages": list(messages), "continue": messages[-1]["role"] == "assistant", "whole": are_whole}
            pipe.write(json.dumps(request) + "\n")


def _cause(code: int, errors: str, seconds: float) -> str:
    if code == -signal.SIGPROF:
        return f"it did not end within {seconds:g} seconds of CPU time; does it loop?"
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    last = (errors.strip() or "it failed without a message").splitlines()[-1]
    return f"{last[:300]} (limit {RENDER_BYTES // 2**30} GiB)" if last.startswith("MemoryError") else last[:300]
