"""Renders chat templates in a process of its own, which an endless or greedy template may kill.

A template comes with a model and is a program: jinja2's sandbox keeps it from Python, not from looping for ever or
from filling the memory, and a loop in C (a huge power) cannot be interrupted from within. So each conversation has a
deadline in CPU time, kept by the kernel, and the process has a limit of memory.

Standard input: a line `{"template": …, "variables": {…}, "seconds": …, "bytes": …}`, then a line a conversation
`{"messages": […], "continue": true, "whole": false}` (whole: neither continued nor asked for an answer). Standard output: a line each, `{"text": …}` or `{"error": …}`.
Run as a script; imports nothing of the package.
"""

from __future__ import annotations

import json
import resource
import signal
import sys

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template can raise, its own raise_exception() included. Anything else ends the process, and its last line tells."""


def main() -> None:
    """Render until standard input ends."""
    setup = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_AS, (setup["bytes"], setup["bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        # CPU time, so that a busy machine is no fault of the template; SIGPROF's default action ends the process.
        signal.setitimer(signal.ITIMER_PROF, setup["seconds"])
        sys.stdout.write(json.dumps(_render(json.loads(line), setup)) + "\n")
        sys.stdout.flush()


def _render(request: dict, setup: dict) -> dict:
    final, whole = request["continue"], request["whole"]
    try:
        (text,), _ = render_jinja_template(
            conversations=[request["messages"]],
            chat_template=setup["template"],
            add_generation_prompt=not final and not whole,
            continue_final_message=final and not whole,
            **setup["variables"],
        )
    except TEMPLATE_ERRORS as error:
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
    return {"text": text}


if __name__ == "__main__":
    main()
