"""The agent's configuration: defaults, units, and errors that name file, line and option."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpuflow.agent.config import Config, as_yaml, parse_config, read_config, table
from dpuflow.cli import run
from dpuflow.errors import OptionError
from dpuflow.settings import read_duration, read_share

DOCS = Path(__file__).resolve().parents[1] / "docs" / "agent.md"


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n", "---\n", "capture:\nwindows:\n"])
def test_an_empty_file_is_a_configuration(text: str) -> None:
    assert parse_config(text, "a.yaml") == Config()


def test_values_with_units() -> None:
    text = """
capture: {interfaces: [p0, p1], buffer: 128MiB}
windows: {step: 500ms, span: 20s, longest: 2min}
limits: {cpu: 150%, memory: 1GiB}
history: {directory: null, keep_age: 7d, keep_size: 5GB}
"""
    config = parse_config(text, "a.yaml")
    assert config.capture.interfaces == ["p0", "p1"]
    assert config.capture.buffer == 128 << 20
    assert (config.windows.step, config.windows.span, config.windows.longest) == (0.5, 20.0, 120.0)
    assert (config.limits.cpu, config.limits.memory) == (1.5, 1 << 30)
    assert (config.history.directory, config.history.keep_age) == (None, 7 * 86400)
    assert config.history.keep_size == 5 * 10**9


def test_one_value_stands_for_a_list_of_one() -> None:
    assert parse_config("capture: {interfaces: eth2}", "a").capture.interfaces == ["eth2"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("windows:\n  stp: 1s\n", "a.yaml:2: windows.stp: not one of step, span, longest, messages, settle; "
         "did you mean step?"),
        ("windw: {}\n", "a.yaml:1: windw: not one of"),
        ("windows:\n  step: fast\n", "a.yaml:2: windows.step: 'fast' is not a duration, such as 500ms"),
        ("windows:\n\n  span: 1s\n", "a.yaml:3: windows.span: 1s is below 2s"),
        ("windows:\n  span: 4s\n  step: 3s\n", "a.yaml:3: windows.step: is more than half of span"),
        ("windows: {span: 20s, longest: 15s}\n", "a.yaml:1: windows.longest: is shorter than span"),
        ("limits: {cpu: lots}\n", "a.yaml:1: limits.cpu: 'lots' is not a share, such as 50% or 0.5"),
        ("limits: {memory: 1MiB}\n", "a.yaml:1: limits.memory: 1MiB is below 256MiB"),
        ("capture:\n  hosts:\n  - 10.0.0.1\n  - host\n", "a.yaml:4: capture.hosts[1]: 'host' is not an IPv4"),
        ("capture:\n  interfaces: []\n", "a.yaml:2: capture.interfaces: is empty: name some, or auto"),
        ("capture: {buffer: 1GiB}\n", "a.yaml:1: limits.memory: has no room: the ring (capture.buffer) and"),
        ("limits: {cpu: 4%}\n", "a.yaml:1: limits.cpu: 4% is below 5%"),
        ("webhooks:\n- url: http://127.0.0.1/\n  conditions: [late]\n", "a.yaml:3: webhooks[0].conditions[0]:"
         " 'late' is not one of straggler, pipeline_bubble"),
        ("capture: {mode: all}\n", "a.yaml:1: capture.mode: 'all' is not one of packets, messages"),
        ("capture: {snaplen: 128, snaplen: 64}\n", "a.yaml:1: capture.snaplen: given twice"),
        ("capture: 3\n", "a.yaml:1: capture: must be a mapping"),
        ("history: {segment: 1min}\n", "a.yaml:1: history.segment: is longer than windows.span (10 s)"),
        ("webhooks:\n- conditions: [straggler]\n", "a.yaml:2: webhooks[0].url: is missing"),
        ("capture: [\n", "a.yaml:2: not YAML"),
        ("- a\n", "a.yaml:1: the configuration: must be a mapping"),
    ],
)  # fmt: skip
def test_errors_name_file_line_and_option(text: str, said: str) -> None:
    with pytest.raises(OptionError) as error:
        parse_config(text, "a.yaml")
    assert said in str(error.value)


def test_what_is_printed_is_read_as_the_same(tmp_path: Path) -> None:
    text = "windows: {step: 250ms}\nlimits: {memory: 300MB, cpu: 12.5%}\nwebhooks: [{url: https://a/b}]\n"
    config = parse_config(text, "a")
    file = tmp_path / "a.yaml"
    file.write_text(as_yaml(config))
    assert read_config(str(file)) == config


def test_what_is_printed_has_no_secrets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("webhooks: [{url: 'https://me:pa55word@example.com/hooks/t0ken?key=k3y'}]\n")
    assert run(["agent", "--config", str(file), "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "https://example.com/..." in printed
    assert not any(secret in printed for secret in ("pa55word", "t0ken", "k3y"))
    assert printed.startswith("# URLs of webhooks may hold secrets")
    file.write_text(printed)  # as it is, it would post elsewhere
    assert run(["agent", "--config", str(file), "--check"]) == 1
    said = "webhooks[0].url: write the rest of the URL in place of '...', which --print-config leaves out"
    assert said in capsys.readouterr().err
    file.write_text("webhooks: [{url: 'https://example.com'}]\n")
    assert run(["agent", "--config", str(file), "--print-config"]) == 0
    assert "#" not in capsys.readouterr().out


def test_the_command_checks_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("limits: {cpu: 25%}\n")
    assert run(["agent", "--config", str(file), "--check"]) == 0
    assert run(["agent", "--config", str(file), "--print-config"]) == 0
    assert "cpu: 25%" in capsys.readouterr().out
    file.write_text("capture: {interfaces: [auto, eth0]}\n")
    assert run(["agent", "--config", str(file), "--check"]) == 1
    assert "give either auto or" in capsys.readouterr().err
    assert run(["agent", "--config", str(tmp_path / "none.yaml"), "--check"]) == 1
    assert "none.yaml" in capsys.readouterr().err
    file.write_bytes(b"log: \xff\n")
    assert run(["agent", "--config", str(file), "--check"]) == 1
    assert "not UTF-8" in capsys.readouterr().err
    file.write_text(f"analysis: {{ranks: {tmp_path}/ranks.yaml}}\n")
    assert run(["agent", "--config", str(file), "--check"]) == 1
    assert f"analysis.ranks: {tmp_path}/ranks.yaml: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "seconds"), [("5", 5), ("250us", 0.00025), ("1.5min", 90), ("2h", 7200)])
def test_durations(text: str, seconds: float) -> None:
    assert read_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "1y", "s", "1 2", "--1s"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        read_duration(text)


@pytest.mark.parametrize("text", ["nan", "inf%", "half"])
def test_what_is_no_share(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        read_share(text)


def test_the_docs_list_every_option() -> None:
    """Else: paste what dpuflow.agent.config.table() returns."""
    text = DOCS.read_text()
    begin, end = "<!-- made by dpuflow.agent.config.table -->\n", "\n<!-- end -->"
    assert text[text.index(begin) + len(begin) : text.index(end)] == table()
