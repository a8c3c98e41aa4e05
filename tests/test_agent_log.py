"""What libraries log is a line of the agent's own log."""

from __future__ import annotations

import io
import json
import logging
from types import SimpleNamespace

import pytest

from dpuflow.agent import log
from dpuflow.agent.log import FromLogging, Log


def test_records_of_libraries_become_lines_of_the_agents_log() -> None:
    stream = io.StringIO()
    logger = logging.Logger("uvicorn.error")
    logger.addHandler(FromLogging(Log("info", "json", stream)))
    logger.debug("not told")
    logger.info("as it is: %s", 1)
    logger.warning("careful")
    try:
        raise OSError(98, "in use")
    except OSError:
        logger.exception("it failed")
    told = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(each["level"], each["event"], each["text"]) for each in told] == [
        ("info", "uvicorn.error", "as it is: 1"),
        ("warning", "uvicorn.error", "careful"),
        ("error", "uvicorn.error", "it failed: OSError(98, 'in use')"),
    ]


def test_what_is_said_over_and_over_fills_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's bad requests were a line each."""
    stream, clock = io.StringIO(), SimpleNamespace(s=1000.0)
    monkeypatch.setattr(
        log, "time", SimpleNamespace(monotonic=lambda: clock.s, time_ns=lambda: 1, strftime=lambda _: "")
    )
    logger = logging.Logger("uvicorn.error")
    logger.addHandler(FromLogging(Log("info", "json", stream)))
    for _ in range(150):
        logger.warning("Invalid HTTP request received.")
        clock.s += 0.5
    logger.warning("something else")
    told = [json.loads(line)["text"] for line in stream.getvalue().splitlines()]
    assert told == [
        "Invalid HTTP request received.",
        "Invalid HTTP request received. (and 119 times more in the last 60 s)",
        "something else",
    ]
    for number in range(1000):  # what differs each time is remembered for a few
        logger.warning(f"request {number}")
