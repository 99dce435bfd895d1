"""Processes that speak JSON by lines: answers, errors, and what is said of one that died."""

import signal

import pytest

from tierstore.bench.processes import WorkerError, end, receive, send, start_module

#: Echoes the first request, says of the second that it failed, and ends without an answer to the third.
WORKER = """
import json, sys
from tierstore.bench.processes import answer_channel, write_line
channel = answer_channel()
print("what a library prints")
write_line(channel, json.loads(sys.stdin.readline()))
sys.stdin.readline()
write_line(channel, {"error": "ConfigError: no"})
sys.stdin.readline()
sys.exit(3)
"""


def test_a_conversation(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "worker_for_test.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = start_module("worker_for_test")
    try:
        send(process, {"steps": 2})
        assert receive(process, "tiered") == {"steps": 2}
        send(process, {})
        with pytest.raises(WorkerError, match=r"^tiered: ConfigError: no$"):
            receive(process, "tiered")
        send(process, {})
        with pytest.raises(WorkerError, match=r"^tiered: exited with status 3$"):
            receive(process, "tiered")
        send(process, {})  # to one that has ended: no error of its own
    finally:
        end(process)
        end(process)


def test_one_that_was_killed() -> None:
    process = start_module("tierstore.bench.train_process")
    process.send_signal(signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"^in RAM: was killed by signal 9$"):
        receive(process, "in RAM")
    end(process)
