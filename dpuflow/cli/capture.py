"""``dpuflow capture``: interfaces in, pcapng out."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import click

from dpuflow.cli.nodes import ending_of, given, on_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dpuflow.live.capture import Summary
    from dpuflow.live.options import LiveOptions
    from dpuflow.live.record import Watcher

EPILOG = """\b
Examples:
  Until Ctrl-C, both directions of one port, RoCE and TCP:
    dpuflow capture -i eth2 -w node0.pcapng
  Who is late, from ten seconds of traffic:
    dpuflow capture -i eth2 --duration 10 -w - | dpuflow analyze -
  For days, the last 50 files of 1 GB, compressed:
    dpuflow capture -i eth2 -w /data/node0.pcapng.zst --rotate-size 1G --files 50
  Messages instead of packets, for rates no disk can take:
    dpuflow capture -i eth2 --mode messages -w node0.dpuflow
  RoCE of two hosts:
    dpuflow capture -i eth2 -w job.pcapng --filter "roce and (host 10.0.0.1 or host 10.0.0.2)"
  On a BlueField, everything through its port, copied by the card:
    dpuflow capture -i p0 --backend doca -w node0.pcapng
  On four nodes at once, the same ten seconds, one file per node in job/:
    dpuflow capture --on node1,node2,node3,node4 -i eth2 --duration 10 -w job
  What is on the wire, no file:
    dpuflow capture -i eth2

Needs root, or CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON; dpuflow doctor checks that.
Losses are counted, printed and written to the file."""

_PACKETS = re.compile(r"\.(pcapng|pcap|cap|ntar)(\.(gz|zst))?$", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


class _Size(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Bytes, with k, M, G or Ki, Mi, Gi."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", str(value).strip().lower())
        if not found:
            self.fail(f"{value!r} is not a size: write 64Mi, 1G or a number of bytes.", param, ctx)
        return round(float(found[1]) * _UNITS[found[2] or ""])


class _Seconds(click.FloatRange):
    """A time in seconds: 10, 10s, 500ms, 5min, 2h."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number of seconds."""
        from dpuflow.settings import read_duration

        try:
            seconds = read_duration(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a time: write 10, 10s, 500ms, 5min or 2h.", param, ctx)
        return float(super().convert(seconds, param, ctx))


class _Megabytes(_Size):
    """As tcpdump has it: a number without a unit counts millions of bytes."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes."""
        text = str(value).strip()
        return super().convert(f"{text}M" if text.isdigit() else text, param, ctx)


def _list_interfaces(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    """-D: the interfaces that can be named, one a line, and end."""
    if not wanted:
        return
    from dpuflow.live.interfaces import interface_lines

    for line in interface_lines():
        click.echo(line)
    ctx.exit()


def _named(ctx: click.Context, param: click.Parameter, interfaces: tuple[str, ...]) -> tuple[str, ...]:
    """-i stands, as ``required`` would have it; but --help does not call it so, as -D goes without."""
    if not interfaces and not ctx.resilient_parsing:
        raise click.MissingParameter(ctx=ctx, param=param)
    return interfaces


def _wrong_output(options: dict[str, Any]) -> Iterator[str]:
    """What is wrong with where packets are to be written."""
    path, messages = options["path"], options["mode"] == "messages"
    rotated = options["rotate_size"] or options["rotate_time"]
    if path == "-" and sys.stdout.isatty():
        yield "-w - would write packets to the terminal: pipe it, or name a file."
    if path == "":
        yield "-w needs the name of a file, or -."
    if messages and path is not None and _PACKETS.search(path):
        yield "--mode messages writes a column file: give it a name such as node0.dpuflow."
    if rotated and path in (None, "-"):
        yield "--rotate-size and --rotate-time need a file, named with -w."
    if (rotated or path == "-") and messages:
        yield "--mode messages writes one column file: name it with -w, without rotation."
    if options["files"] and not rotated:
        yield "--files needs --rotate-size or --rotate-time."


def _wrong_backend(options: dict[str, Any]) -> Iterator[str]:
    """Options that the backend has not."""
    backend = options["backend"]
    if backend in ("bcc", "psample", "doca") and options["mode"] == "messages":
        yield f"--backend {backend} supports packets mode only."
    if backend in ("afpacket", "psample", "doca") and options["hook"] != "auto":
        yield f"--backend {backend} has no hooks: drop --hook."
    if backend != "psample" and given("group"):
        yield "--group goes with --backend psample."
    for name in ("peer", "copy_by", "production", "sample_packets"):
        if backend != "doca" and given(name):
            yield f"--{name.replace('_', '-')} goes with --backend doca."
    if options["timestamps"] == "hardware" and backend != "ebpf":
        yield "--timestamps hardware needs --backend ebpf."


def _wrong_filter(options: dict[str, Any]) -> Iterator[str]:
    """A filter expression beside what it replaces."""
    others = any(options[name] for name in ("hosts", "ports", "qps", "vlans")) or given("protocols")
    if options["expression"] is not None and others:
        yield "--filter replaces --protocol, --host, --port, --qp and --vlan: give one or the other."


def _live_options(options: dict[str, Any]) -> LiveOptions:
    """What to capture, and how."""
    from dpuflow.errors import OptionError
    from dpuflow.live.expression import translate
    from dpuflow.live.options import DocaOptions, LiveOptions

    names = (
        "interfaces", "snaplen", "sample", "buffer", "hook", "mode", "timestamps", "promiscuous", "group",
    )  # fmt: skip
    wanted = ("protocols", "hosts", "ports", "qps", "vlans")
    of_doca = ("peer", "copy_by", "production", "sample_packets")
    try:
        expression = options["expression"]
        filters = options if expression is None else vars(translate(expression))
        return LiveOptions(
            **{name: options[name] for name in names},
            **{name: filters[name] for name in wanted},
            doca=DocaOptions(*(options[name] for name in of_doca)),
        )
    except OptionError as error:
        raise click.UsageError(f"{error}.") from None


@click.command(epilog=EPILOG)
@click.option(
    "-i",
    "--interface",
    "interfaces",
    metavar="IF",
    multiple=True,
    callback=_named,
    help="Interface to capture on, both directions; repeatable. Required, but for -D.",
)
@click.option(
    "-D",
    "--list-interfaces",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_interfaces,
    help="List the interfaces and exit.",
)
@click.option(
    "-w",
    "--write",
    "path",
    metavar="FILE",
    help="Output file; its name picks the format: .pcapng or .pcap, compressed with .gz or .zst;"
    " anything else is pcapng, - is standard output. Without it, packets are only counted.",
)
@click.option(
    "--mode",
    type=click.Choice(["packets", "messages"]),
    default="packets",
    show_default=True,
    help="messages: the kernel folds the middle of RoCE messages; -w names a column file for dpuflow"
    " analyze.",
)
@click.option(
    "--duration", type=_Seconds(min=0, min_open=True), metavar="TIME", help="Stop after this long: 10s, 5min."
)
@click.option("-c", "--count", type=click.IntRange(min=1), metavar="N", help="Stop after N packets.")
@click.option(
    "-s",
    "--snaplen",
    type=click.IntRange(min=0),
    default=128,
    show_default=True,
    metavar="B",
    help="Bytes to keep of each packet: 64 to 262144, or 0 for all; 192 behind ERSPAN or VXLAN, IPv6 256.",
)
@click.option(
    "--filter",
    "expression",
    metavar="EXPR",
    help='Filter expression: "roce and (host 10.0.0.1 or host 10.0.0.2) and qp 17".'
    " Replaces the next five options.",
)
@click.option(
    "--protocol",
    "protocols",
    type=click.Choice(["roce", "tcp", "any"]),
    multiple=True,
    default=("roce", "tcp"),
    show_default=True,
    help="roce: RoCEv1, RoCEv2 and pause frames; any: every packet.",
)
@click.option("--host", "hosts", metavar="ADDR", multiple=True, help="Only packets from or to this address.")
@click.option("--port", "ports", type=int, metavar="P", multiple=True, help="TCP: only this port.")
@click.option(
    "--qp",
    "qps",
    type=int,
    metavar="QP",
    multiple=True,
    help="RoCE: only packets to this QP (ACKs go to the peer's).",
)
@click.option("--vlan", "vlans", type=int, metavar="ID", multiple=True, help="Only this (outer) VLAN.")
@click.option(
    "--sample",
    type=click.IntRange(0, 16),
    default=0,
    metavar="K",
    help="Keep one in 2^K pairs of hosts, with all of its traffic: messages stay whole.",
)
@click.option(
    "--buffer",
    type=_Size(),
    default="64Mi",
    show_default=True,
    metavar="SIZE",
    help="Ring between kernel and dpuflow; rounded up to a power of two.",
)
@click.option(
    "--hook",
    type=click.Choice(["auto", "tcx", "clsact", "xdp", "xdp-generic"]),
    default="auto",
    show_default=True,
    help="Where programs attach: tcx (Linux 6.6 and later), else clsact; xdp sees"
    " received packets only, earlier and at lower cost.",
)
@click.option(
    "--backend",
    type=click.Choice(["ebpf", "bcc", "afpacket", "psample", "doca"]),
    default="ebpf",
    show_default=True,
    help="ebpf: precompiled programs; bcc: the same, compiled now; afpacket: packet sockets, slower, needs"
    " CAP_NET_RAW only; psample: the samples of dpuflow mirror sample; doca: copies made by a"
    " BlueField, with -i its uplink (p0) or PCI address.",
)
@click.option(
    "--group",
    type=click.IntRange(0, 2**32 - 1),
    default=55776,
    show_default=True,
    metavar="G",
    help="psample: the group that dpuflow mirror sample uses.",
)
@click.option(
    "--peer",
    metavar="REP",
    default="hpf",
    show_default=True,
    help="doca: what is behind the uplink: the host (hpf), or its function vfN or sfN.",
)
@click.option(
    "--copy-by",
    type=click.Choice(["auto", "mirror", "flood"]),
    default="auto",
    show_default=True,
    hidden=True,  # docs/doca.md
    help="doca: the shared mirror (DOCA 2.5 to 3.1) or a hash pipe that floods (from 3.1).",
)
@click.option(
    "--production",
    type=click.Choice(["pair", "kernel"]),
    default="pair",
    show_default=True,
    hidden=True,  # docs/doca.md
    help="doca: traffic is forwarded by the card itself (pair), or as the kernel has set it up (kernel).",
)
@click.option(
    "--sample-packets",
    type=click.IntRange(0, 16),
    default=0,
    metavar="K",
    help="doca: the card copies one in 2^K packets of what --sample keeps. Enough for rates and ECN marks;"
    " messages cannot be followed.",
)
@click.option(
    "--timestamps",
    type=click.Choice(["auto", "kernel", "hardware"]),
    default="auto",
    show_default=True,
    help="hardware: NIC timestamps of received packets, in wall time; auto: those where the NIC has them"
    " on (hwstamp_ctl), else the kernel's receive timestamps; kernel: its clock when a packet passes"
    " dpuflow's program.",
)
@click.option(
    "--promiscuous",
    is_flag=True,
    help="Promiscuous mode: receive packets addressed to others, such as mirrored traffic.",
)
@click.option(
    "-C",
    "--rotate-size",
    type=_Megabytes(),
    default=0,
    metavar="SIZE",
    help="Start a new file every SIZE: 1G, 64Mi; a bare number is millions of bytes, as in tcpdump.",
)
@click.option(
    "-G",
    "--rotate-time",
    type=_Seconds(min=0),
    default=0.0,
    metavar="TIME",
    help="Start a new file this often: 60, 5min.",
)
@click.option(
    "-W",
    "--files",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Keep the last N files of a rotated capture.",
)
@click.option(
    "--on",
    "on",
    metavar="NODE,NODE",
    multiple=True,
    help="Capture on these nodes over the same window; -w names a folder for one file per node. Each needs"
    " dpuflow installed.",
)
@click.option(
    "--over",
    metavar="COMMAND",
    default="ssh -o BatchMode=yes {node} {line}",
    show_default=True,
    help='How to run a command on a node: {line}: the command, quoted; {command}: its words; "srun -N1'
    ' -n1 -w {node} {command}" or "kubectl exec -i {node} -- {command}".',
)
@click.option("--as-node", is_flag=True, hidden=True)
@click.option("--quiet", is_flag=True, help="No live line and no summary; warnings and errors only.")
def capture(
    interfaces: tuple[str, ...], path: str | None, mode: str, duration: float | None, count: int | None,
    snaplen: int, expression: str | None,
    protocols: tuple[str, ...], hosts: tuple[str, ...], ports: tuple[int, ...], qps: tuple[int, ...],
    vlans: tuple[int, ...], sample: int, buffer: int, hook: str, backend: str, timestamps: str,
    promiscuous: bool, group: int, peer: str, copy_by: str, production: str, sample_packets: int,
    rotate_size: int,
    rotate_time: float, files: int, on: tuple[str, ...], over: str, as_node: bool, quiet: bool,
) -> None:  # fmt: skip
    """Capture RoCE and TCP packets from interfaces with eBPF into a pcapng file.

    Packets are copied in the kernel and never delayed, dropped or changed; other programs on the interface
    are left alone. Ctrl-C or SIGTERM stops it with a complete file.
    """
    options = click.get_current_context().params
    for sentence in (*_wrong_output(options), *_wrong_backend(options), *_wrong_filter(options)):
        raise click.UsageError(sentence)

    from dpuflow.errors import DpuflowError
    from dpuflow.kernels import when_compiling
    from dpuflow.live.output import Rotation
    from dpuflow.live.record import Until, record
    from dpuflow.reports.live import LiveLine, summary_lines

    if quiet:
        when_compiling.clear()
    asked = _live_options(options)
    if on:
        on_nodes(on, over, path, mode, duration, quiet)
        return

    def take(
        file: str | None, seconds: float | None, watcher: Watcher, stopped: Callable[[], bool] = lambda: False
    ) -> Summary:
        return record(
            asked,
            file,
            backend=backend,
            rotation=Rotation(rotate_size, rotate_time, files),
            until=Until(seconds, count, stopped),
            watcher=watcher,
        )

    def tell(summary: Summary) -> None:
        for text in summary_lines(summary, warnings_only=quiet):
            click.echo(text, err=True)
        if summary.reason is not None:
            raise DpuflowError(summary.reason)

    if as_node:
        from dpuflow.live.node import serve

        with open(0, "rb", buffering=0, closefd=False) as words:
            serve(lambda file, *how: tell(take(file, None, *how)), ending_of(mode), words, sys.stdout.buffer)
    else:
        with LiveLine(enabled=not quiet) as line:
            summary = take(path, duration, line)
        tell(summary)
