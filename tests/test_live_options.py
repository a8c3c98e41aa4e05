"""``dpuflow capture`` and ``doctor`` called wrongly: status 2 and a sentence, before anything is attached."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from dpuflow.cli import run
from dpuflow.cli.commands import dpuflow

WRONG = [
    (("--snaplen", "10"), "snap length 10 is out of range: 64"),
    (("--snaplen", "300000"), "to 262144"),
    (("-i", "lo"), "an interface is named twice"),
    (("--host", "foo"), "host 'foo' is not an IPv4 or IPv6 address"),
    (("--host", "10.0.0.0/8"), "is not an IPv4 or IPv6 address"),
    (("--port", "70000"), "70000 is not a port"),
    (("--qp", "16777216"), "16777216 is not a QP"),
    (("--vlan", "4095"), "4095 is not a VLAN"),
    (("--port", "5000", "--protocol", "roce"), "port 5000 is of protocol tcp, and roce alone is captured"),
    (("--qp", "5", "--protocol", "tcp"), "QP 5 is of protocol roce"),
    (tuple(word for k in range(9) for word in ("--port", str(k))), "9 ports given; at most 8"),
    (("--filter", "not roce"), "--filter: "),
    (("--filter", "host foo"), "host 'foo' is not an IPv4 or IPv6 address"),
    (("--filter", "roce", "--qp", "5"), "--filter replaces --protocol"),
    (("--buffer", "1"), "a buffer of 1 bytes: must be 64Ki to 2Gi"),
    (("--buffer", "64G"), "must be 64Ki to 2Gi"),
    (("--buffer", "lots"), "'lots' is not a size"),
    (("--duration", "nan"), "is not a time: write 10, 10s"),
    (("--duration", "0"), "--duration"),
    (("--count", "0"), "--count"),
    (("--sample", "17"), "--sample"),
    (("--mode", "words"), "--mode"),
    (("--hook", "there"), "--hook"),
    (("--backend", "guess"), "--backend"),
    (("--backend", "afpacket", "--hook", "xdp"), "--backend afpacket has no hooks"),
    (("--backend", "bcc", "--mode", "messages"), "--backend bcc supports packets mode only"),
    (("--backend", "afpacket", "--timestamps", "hardware"), "--timestamps hardware needs --backend ebpf"),
    (("--hook", "xdp-generic", "--timestamps", "hardware"), "hardware timestamps need --hook"),
    (("--mode", "messages", "-w", "-"), "--mode messages writes one column file"),
    (("--mode", "messages", "-w", "x", "--rotate-size", "1M"), "--mode messages writes one column file"),
    (("--rotate-size", "1M"), "--rotate-size and --rotate-time need a file"),
    (("--rotate-time", "5", "-w", "-"), "--rotate-size and --rotate-time need a file"),
    (("--rotate-time", "nan", "-w", "x"), "is not a time: write 10, 10s"),
    (("--files", "3", "-w", "x"), "--files needs --rotate-size or --rotate-time"),
    (("-w", ""), "-w needs the name of a file"),
    (("more",), "unexpected extra argument"),
]


@pytest.mark.parametrize(("arguments", "why"), WRONG, ids=lambda value: str(value)[:40])
def test_a_capture_that_cannot_be_meant_is_wrong_usage(
    arguments: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["capture", "-i", "lo", *arguments]) == 2
    said = capsys.readouterr()
    assert why in said.err
    assert not said.out


def test_an_interface_that_is_not_there_is_no_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for backend in ("ebpf", "afpacket"):
        assert run(["capture", "-i", "nosuch0", "--backend", backend]) == 1
        assert "nosuch0: no such interface; this machine has " in capsys.readouterr().err


def test_doctor_says_no_where_a_named_interface_cannot_be_captured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["doctor", "-i", "nosuch0"]) == 1
    said = capsys.readouterr()
    assert "NO  nosuch0      nosuch0: no such interface" in said.out
    assert said.err.startswith("dpuflow: ")
    assert run(["doctor", "-i", "lo", "--clean"]) == 2


def test_an_interface_is_required_but_to_list_them() -> None:
    runner = CliRunner()
    assert "[required]" not in runner.invoke(dpuflow, ["capture", "--help"]).output
    without = runner.invoke(dpuflow, ["capture"])
    assert without.exit_code == 2
    assert "Missing option '-i'" in without.output
    assert runner.invoke(dpuflow, ["capture", "-D"]).exit_code == 0
