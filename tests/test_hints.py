"""What is said where something else than a capture, an interface or a command was named."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from dpuflow.capture import open_capture
from dpuflow.cli.commands import dpuflow
from dpuflow.errors import DpuflowError, FormatError
from dpuflow.live.base import find_interface
from dpuflow.live.doctor import Check
from dpuflow.loading import load

if TYPE_CHECKING:
    from pathlib import Path


def test_a_result_is_no_capture(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"schema": "dpuflow.analysis/1"}')
    with pytest.raises(FormatError, match="dpuflow report"):
        open_capture([str(tmp_path / "result.json")])


def test_a_capture_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "node0.pcap.gz").write_bytes(gzip.compress(bytes(100)))
    with pytest.raises(FormatError, match="dpuflow analyze") as told:
        load(str(tmp_path / "node0.pcap.gz"))
    assert "codec" not in str(told.value)


def test_a_command_that_is_nearly_one() -> None:
    told = CliRunner().invoke(dpuflow, ["analyse"])
    assert told.exit_code == 2
    assert "'analyze'" in told.output


def test_any_interface() -> None:
    with pytest.raises(DpuflowError, match="-i for each"):
        find_interface("any")


def test_what_a_plain_host_has_not_is_no_fault() -> None:
    assert Check("ovs", False, "no ovs-vsctl: Open vSwitch is not installed").absent
    assert Check("card", False, "no BlueField found: --backend doca and mirror tc need one").absent
    assert not Check("ovs", False, "Open vSwitch is installed, but not running").absent
