from __future__ import annotations

import io

import pytest

from rloo_cli.serving.server_log import ServerLog, failure, last_words, refused_options, root_cause

ENGINE_FAILED = """\
(APIServer pid=1) INFO 11-29 17:10:50 [model.py:733] Resolved architecture: Qwen2ForCausalLM
(APIServer pid=1) WARNING 11-29 17:10:50 [vllm.py:1703] Enforce eager set
UserWarning: something harmless: yes
(EngineCore pid=2) ERROR 11-29 17:10:58 [core.py:900] EngineCore failed to start.
(EngineCore pid=2) ERROR 11-29 17:10:58 [core.py:900] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-29 17:10:58 [core.py:900]   File "x.py", line 3, in f
(EngineCore pid=2) ERROR 11-29 17:10:58 [core.py:900] ValueError: To serve at least one request with the model's max seq len (4096), 1.0 GiB KV cache is needed, which is larger than the available KV cache memory (0.06 GiB).
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
""".splitlines()


def test_the_reason_is_the_first_exception_not_its_echo():
    assert root_cause(ENGINE_FAILED).startswith("ValueError: To serve at least one request")
    assert root_cause(ENGINE_FAILED[-1:]) == ""


def test_a_known_reason_has_a_remedy():
    message = failure(ENGINE_FAILED, what="vLLM ended while starting", where=" What it said: /tmp/x.log", started=False).message
    assert message.startswith("vLLM ended while starting: ValueError: To serve")
    assert message.endswith("Give a smaller --max-model-len, or more memory: --gpu-memory-utilization. What it said: /tmp/x.log")
    assert "\n" not in message


def test_an_echo_is_better_than_nothing_and_a_line_better_than_silence():
    assert last_words(ENGINE_FAILED[-1:]).startswith("RuntimeError: Engine core initialization failed")
    assert last_words(["something", "x.py: error: what went wrong", "something else"]) == "x.py: error: what went wrong"
    assert last_words(["something", ""]) == "something"
    assert last_words([]) == ""


def test_a_death_without_a_reason_is_not_blamed_on_the_last_line():
    lines = ["INFO 11-29 17:10:50 [x.py:1] Route: /health", "EngineDeadError: EngineCore encountered an issue. See stack trace"]
    message = failure(lines, what="VLLM::Worker (pid 7), a process of vLLM's engine, died", where="", started=True).message
    assert message == "VLLM::Worker (pid 7), a process of vLLM's engine, died, without a word: killed, perhaps for want of memory."


def test_options_that_vllm_does_not_take_are_a_refusal():
    lines = ["usage: api_server.py [-h]", "api_server.py: error: unrecognized arguments: --no-such"]
    assert refused_options(lines).message == "vLLM does not take these options: unrecognized arguments: --no-such"
    assert refused_options(ENGINE_FAILED) is None


def test_the_key_is_masked_wherever_it_stands():
    shown = []
    log = ServerLog(secret="the-secret-key", level="info", show=shown.append)
    log.follow(io.BytesIO(b"INFO 11-29 17:10:50 [x.py:1] key=the-secret-key;\nthe-secret-keythe-secret-key\n\xff\xfe\n"))
    log.finish(5)
    assert shown == ["INFO 11-29 17:10:50 [x.py:1] key=***;", "******", "\ufffd\ufffd"]
    assert "the-secret-key" not in "".join(log.lines())


@pytest.mark.parametrize(("level", "count"), [("debug", 9), ("info", 9), ("warning", 8), ("error", 6), ("critical", 0)])
def test_a_level_chooses_what_is_shown_with_the_lines_that_belong_to_it(level, count):
    shown = []
    log = ServerLog(secret=None, level=level, show=shown.append)
    for line in ENGINE_FAILED:
        log.add(line)
    assert len(shown) == count
    assert len(log.lines()) == 9


def test_nothing_is_shown_once_quiet_but_all_is_kept():
    shown = []
    log = ServerLog(secret=None, level="debug", show=shown.append)
    log.quiet()
    log.add("ERROR 11-29 17:10:50 [x.py:1] frightening")
    assert (shown, log.lines()) == ([], ["ERROR 11-29 17:10:50 [x.py:1] frightening"])


def test_memory_stays_bounded():
    log = ServerLog(secret=None, level="error", show=print)
    log.follow(io.BytesIO(b"x" * 1_000_000 + b"\n" + b"y\n" * 10_000))
    log.finish(10)
    assert len(log.lines()) == 3000
    assert max(len(line) for line in log.lines()) <= 4000


def test_the_news_is_the_last_stamped_line():
    log = ServerLog(secret=None, level="error", show=print)
    assert log.last_news() == ""
    for line in ENGINE_FAILED[:3]:
        log.add(line)
    assert log.last_news() == "Enforce eager set"


def test_only_recent_lines_count_for_a_late_death():
    log = ServerLog(secret=None, level="error", show=print)
    log.add("ValueError: of an hour ago")
    assert log.lines(seconds=0.0) == []
    assert log.lines(seconds=60.0) == ["ValueError: of an hour ago"]
