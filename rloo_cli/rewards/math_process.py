"""The process in which mathematics is parsed and compared: one JSON request a line in, one JSON answer a line out.

Run as `python -m rloo_cli.rewards.math_process SECONDS MEGABYTES`. sympy can take any time and memory for an answer of a
dozen characters (9^{9^{9^9}}), inside C code that no exception can leave. So a child of this process does the work, under
a timer of CPU time whose signal ends it, and a limit of memory; this process answers `null` for it and forks the next
one (milliseconds, the imports are done).
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

LONGEST_SHOWN = 200
"""Characters of a parsed expression that are reported."""

# An answer counts only as LaTeX: boxed, or after "answer"; what TRL's accuracy_reward asks for.
_ANSWER = (
    LatexExtractionConfig(normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False),
)


def main(seconds: float, megabytes: int) -> None:
    """Answer requests until standard input ends."""
    logging.disable(logging.CRITICAL)
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(stop, signal.SIG_IGN)  # they are the trainer's; this process ends with its standard input
    while True:
        child = os.fork()
        if child == 0:
            _serve(seconds, megabytes)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return
        _reply(None)


def _serve(seconds: float, megabytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (megabytes * 2**20, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = _answer(json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        _reply(answer)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    gold = _parse_gold(tuple(request["gold"]))
    if request["answer"] is None:
        return {"parsed": any(not isinstance(item, str) for item in gold), "shown": _shown(gold)}
    answer = parse(request["answer"], extraction_config=_ANSWER, extraction_mode="first_match", parsing_timeout=None)
    shown = _shown(answer) if request["show"] else ""
    return {"score": float(verify(gold, answer, timeout_seconds=None)), "shown": shown}


@lru_cache(maxsize=4096)
def _parse_gold(forms: tuple[str, ...]) -> list[Any]:
    """What the first form that is mathematics parses to; else the strings that the last form leaves."""
    parsed: list[Any] = []
    for form in forms:
        parsed = parse(form, parsing_timeout=None) or parsed
        if any(not isinstance(item, str) for item in parsed):
            break
    return parsed


def _shown(parsed: list[Any]) -> str:
    try:
        return str(parsed[0])[:LONGEST_SHOWN] if parsed else ""
    except (ValueError, RecursionError):  # integers beyond Python's digit limit, towers of brackets
        return str(parsed[-1])[:LONGEST_SHOWN] if isinstance(parsed[-1], str) else "[too large to show]"


def _reply(answer: dict[str, Any] | None) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
