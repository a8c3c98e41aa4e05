"""An agent beside ``top``: for an interface that none watches yet, as long as one looks."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dpuflow.errors import DpuflowError

if TYPE_CHECKING:
    from collections.abc import Iterator

READY_S: Final = 30.0


@contextlib.contextmanager
def agent_on(interface: str) -> Iterator[str]:
    """The URL of an agent that captures from ``interface`` alone. Raises DpuflowError with its own words."""
    with tempfile.TemporaryDirectory(prefix="dpuflow-top-") as folder:
        Path(folder).chmod(0o755)  # started as root, the agent goes on as another user
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        config, log = Path(folder, "agent.yaml"), Path(folder, "log")
        config.write_text(f"capture: {{interfaces: [{interface!r}]}}\napi: {{listen: '127.0.0.1:{port}'}}\n")
        command = [sys.executable, "-m", "dpuflow", "agent", "--config", str(config)]
        with log.open("wb") as said:
            process = subprocess.Popen(command, stdout=said, stderr=said, stdin=subprocess.DEVNULL)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for(url, process, log)
            yield url
        finally:
            process.terminate()
            process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return once the agent answers."""
    until_s = time.monotonic() + READY_S
    while time.monotonic() < until_s:
        if process.poll() is not None:
            lines = log.read_text(errors="replace").strip().splitlines() or ["the agent ended"]
            raise DpuflowError(lines[-1].removeprefix("dpuflow: "))
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/healthz", timeout=1):
            return
        time.sleep(0.1)
    raise DpuflowError(f"the agent on {url} does not answer within {READY_S:.0f} s")
