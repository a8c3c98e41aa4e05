"""The unit's exposure, as systemd itself scores it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).resolve().parents[1] / "deploy" / "systemd" / "dpuflow-agent.service"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")
def test_the_unit_is_exposed_little() -> None:
    """2.4 before: perf_event_open, @resources and mounts, none of which the agent uses."""
    command = ["systemd-analyze", "security", "--offline=yes", "--no-pager", str(UNIT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    told = re.search(r"exposure level for dpuflow-agent.service: ([\d.]+)", done.stdout)
    if told is None:
        pytest.skip(f"this systemd does not score files: {done.stderr[:80]}")
    assert float(told[1]) <= 2.0
