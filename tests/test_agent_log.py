"""What libraries log is a line of the agent's own log."""

from __future__ import annotations

import io
import json
import logging

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
