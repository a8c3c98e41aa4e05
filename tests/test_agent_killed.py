"""The history of an agent that is killed over and over, at any moment of its writing."""

from __future__ import annotations

import io
import os
import random
import signal
import time
from pathlib import Path

import pytest
from feeding import pieces
from test_agent_windows import FILES

from dpuflow.agent.config import History as Settings
from dpuflow.agent.history import History
from dpuflow.agent.log import Log
from dpuflow.agent.stream import Counts, Stream
from dpuflow.schema.tables import CaptureTables
from dpuflow.store.columns import load_tables
from dpuflow.store.segments import list_segments

KILLS = 1000
SEGMENT_NS = 100_000_000


def steps(path: Path) -> list[tuple[CaptureTables, Counts, int]]:
    """What a capture holds at some times of it."""
    stream, found = Stream("node0"), []
    for now, form, records in pieces(path, SEGMENT_NS):
        stream.feed(form, records)
        taken = stream.snapshot(now)
        found.append((taken.tables(), taken.counts(), now))
    return found


@pytest.mark.long
def test_killed_a_thousand_times_no_file_is_unreadable_and_what_was_written_stays(tmp_path: Path) -> None:
    """A child writes segments until it is killed, the next one goes on behind what is on the disk.

    Every file can be read all the time, and what was on the disk stays there: a kill costs what is in
    progress, which is less than ``windows.span``.
    """
    made = steps(FILES[0])[:12]
    settings = Settings(directory=str(tmp_path), segment=SEGMENT_NS / 1e9, keep_age=86400.0 * 36500)
    draw, written, killed, usual_s = random.Random(1), 0, 0, 0.0
    for number in range(-1, KILLS):
        begun = time.monotonic()
        child = os.fork()
        if child == 0:
            try:
                history = History(settings, "node0", Log(stream=io.StringIO()))
                for tables, counts, now in made[written % len(made) :] + made:
                    history.take(tables, counts, now)
                    history.take(tables, counts, now + SEGMENT_NS)
            finally:
                os._exit(0)
        if number >= 0:  # the first one is left to its end, and shows how long that is
            time.sleep(usual_s * draw.random() ** 3)  # later ones find less to write
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        usual_s = usual_s or time.monotonic() - begun
        killed += os.WIFSIGNALED(status)
        if number % 20 == 0 or number == KILLS - 1:
            segments = list_segments(str(tmp_path))
            rows = sum(len(load_tables(each.path).messages) for each in segments)
            assert rows >= written
            written = rows
    assert killed > KILLS / 2
    assert written
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".damaged")]
