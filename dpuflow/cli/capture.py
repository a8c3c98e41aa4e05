"""``dpuflow capture``: interfaces in, pcapng out."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import click

from dpuflow.cli.nodes import ending_of, given, on_nodes

if TYPE_CHECKING:
    from collections.abc import Callable

EPILOG = """\b
Examples:
  Until Ctrl-C, both directions of one port, RoCE and TCP:
    dpuflow capture -i eth2 -w node0.pcapng
  Who is late, from ten seconds of traffic:
    dpuflow capture -i eth2 --duration 10 -w - | dpuflow analyze -
  For days, the last 50 files of 1 GB, compressed:
    dpuflow capture -i eth2 -w /data/node0.pcapng.zst --rotate-size 1G --files 50
  Messages in place of packets, for rates that no file could take:
    dpuflow capture -i eth2 --mode messages -w node0.dpuflow
  Of one job's two hosts:
    dpuflow capture -i eth2 -w job.pcapng --filter "roce and (host 10.0.0.1 or host 10.0.0.2)"
  On a BlueField, all that goes through its port, copied by the card:
    dpuflow capture -i p0 --backend doca -w node0.pcapng
  On four nodes at a time, the same ten seconds, a file of each in job/:
    dpuflow capture --on node1,node2,node3,node4 -i eth2 --duration 10 -w job
  What is on the wire, without a file:
    dpuflow capture -i eth2

Needs root, or CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON; dpuflow doctor tells what
this machine allows. What was lost is counted, printed and written to the file."""

_PACKETS = re.compile(r"\.(pcapng|pcap|cap|ntar)(\.(gz|zst))?$", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


class _Size(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Bytes, with k, M, G or Ki, Mi, Gi."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", str(value).strip().lower())
        if not found:
            self.fail(f"{value!r} is no size: write 64Mi, 1G or a number of bytes.", param, ctx)
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
            self.fail(f"{value!r} is no time: write 10, 10s, 500ms, 5min or 2h.", param, ctx)
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


@click.command(epilog=EPILOG)
@click.option(
    "-i",
    "--interface",
    "interfaces",
    metavar="IF",
    multiple=True,
    required=True,
    help="An interface to capture from, both directions; may be given several times.",
)
@click.option(
    "-D",
    "--list-interfaces",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_interfaces,
    help="List the interfaces to capture from, and end.",
)
@click.option(
    "-w",
    "--write",
    "path",
    metavar="FILE",
    help="File to write, of the format that its name says: .pcapng or .pcap, with .gz or .zst compressed;"
    " any other is pcapng; - is standard output. Without it, packets are counted only.",
)
@click.option(
    "--mode",
    type=click.Choice(["packets", "messages"]),
    default="packets",
    show_default=True,
    help="messages: the kernel folds the middle of RoCE messages, and -w names a column file for dpuflow"
    " analyze.",
)
@click.option(
    "--duration", type=_Seconds(min=0, min_open=True), metavar="TIME", help="End after this time: 10s, 5min."
)
@click.option("-c", "--count", type=click.IntRange(min=1), metavar="N", help="End after N packets.")
@click.option(
    "-s",
    "--snaplen",
    type=click.IntRange(min=0),
    default=128,
    show_default=True,
    metavar="B",
    help="Bytes to keep of a packet: 64 to 262144, or 0 for all.",
)
@click.option(
    "--filter",
    "expression",
    metavar="EXPR",
    help='What to capture, in one expression: "roce and (host 10.0.0.1 or host 10.0.0.2) and qp 17".'
    " In place of the next five options.",
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
@click.option("--port", "ports", type=int, metavar="P", multiple=True, help="Of TCP only this port.")
@click.option(
    "--qp",
    "qps",
    type=int,
    metavar="QP",
    multiple=True,
    help="Of RoCE only packets to this QP; ACKs go to the other end's.",
)
@click.option("--vlan", "vlans", type=int, metavar="ID", multiple=True, help="Only this (outer) VLAN.")
@click.option(
    "--sample",
    type=click.IntRange(0, 16),
    default=0,
    metavar="K",
    help="Keep the traffic of one in 2^K pairs of hosts, all of it.",
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
    help="Where programs are attached: tcx (Linux 6.6), else clsact; xdp sees what"
    " comes in only, earlier and at less cost.",
)
@click.option(
    "--backend",
    type=click.Choice(["ebpf", "bcc", "afpacket", "psample", "doca"]),
    default="ebpf",
    show_default=True,
    help="ebpf: programs made beforehand; bcc: the same, compiled now; afpacket: packet sockets, where eBPF"
    " is not allowed, slower, needs CAP_NET_RAW alone; psample: what dpuflow mirror sample samples; doca:"
    " copies made by a BlueField, whose uplink (p0) or PCI address -i names.",
)
@click.option(
    "--group",
    type=click.IntRange(0, 2**32 - 1),
    default=55776,
    show_default=True,
    metavar="G",
    help="psample: the group, as dpuflow mirror sample has it.",
)
@click.option(
    "--peer",
    metavar="REP",
    default="hpf",
    show_default=True,
    help="doca: who is behind the uplink: the host (hpf), or its function vfN or sfN.",
)
@click.option(
    "--copy-by",
    type=click.Choice(["auto", "mirror", "flood"]),
    default="auto",
    show_default=True,
    help="doca: the shared mirror (DOCA 2.5 to 3.1) or a hash pipe that floods (from 3.1).",
)
@click.option(
    "--production",
    type=click.Choice(["pair", "kernel"]),
    default="pair",
    show_default=True,
    help="doca: traffic goes on between uplink and peer by the card itself, or as the kernel has set it up.",
)
@click.option(
    "--sample-packets",
    type=click.IntRange(0, 16),
    default=0,
    metavar="K",
    help="doca: copy one in 2^K packets, drawn by the card. What is missing then is no loss, but messages"
    " cannot be told: for rates and marks alone.",
)
@click.option(
    "--timestamps",
    type=click.Choice(["auto", "kernel", "hardware"]),
    default="auto",
    show_default=True,
    help="hardware: the NIC's stamps of received packets, in wall time; auto: those, where the NIC has been"
    " told to stamp (hwstamp_ctl), else those that the kernel has made when they came in; kernel: its clock"
    " when they pass dpuflow's program.",
)
@click.option(
    "--promiscuous",
    is_flag=True,
    help="Have the NIC take packets that are addressed to others, as mirrored traffic is.",
)
@click.option(
    "-C",
    "--rotate-size",
    type=_Megabytes(),
    default=0,
    metavar="SIZE",
    help="Begin another file after SIZE: 1G, 64Mi; a bare number is in millions of bytes, as tcpdump's.",
)
@click.option(
    "-G",
    "--rotate-time",
    type=_Seconds(min=0),
    default=0.0,
    metavar="TIME",
    help="Begin another file this often: 60, 5min.",
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
    help="Capture on these nodes, all in the same window; -w names a folder for a file of each. They need"
    " dpuflow and what it needs there.",
)
@click.option(
    "--over",
    metavar="COMMAND",
    default="ssh -o BatchMode=yes {node} {line}",
    show_default=True,
    help='How a command is run on a node: {line} is it for a shell, {command} its words, as in "srun -N1 -n1'
    ' -w {node} {command}" or "kubectl exec -i {node} -- {command}".',
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

    Packets are copied in the kernel, never held up, dropped or changed; other programs on the interface
    stay as they are. Ctrl-C and SIGTERM end it with a whole file.
    """
    if path == "-" and sys.stdout.isatty():
        raise click.UsageError("-w - would write packets to the terminal: pipe it, or name a file.")
    if path == "":
        raise click.UsageError("-w needs the name of a file, or -.")
    if mode == "messages" and path is not None and _PACKETS.search(path):
        raise click.UsageError("--mode messages writes a column file: name it .dpuflow, say.")
    if (rotate_size or rotate_time) and path in (None, "-"):
        raise click.UsageError("--rotate-size and --rotate-time need a file, named with -w.")
    if (rotate_size or rotate_time or path == "-") and mode == "messages":
        raise click.UsageError("--mode messages writes one column file: name it with -w, without rotation.")
    if backend in ("bcc", "psample", "doca") and mode == "messages":
        raise click.UsageError(f"--backend {backend} has packets mode alone.")
    if backend in ("afpacket", "psample", "doca") and hook != "auto":
        raise click.UsageError(f"--backend {backend} has no hooks: leave out --hook.")
    if backend != "psample" and given("group"):
        raise click.UsageError("--group goes with --backend psample.")
    for name in ("peer", "copy_by", "production", "sample_packets"):
        if backend != "doca" and given(name):
            raise click.UsageError(f"--{name.replace('_', '-')} goes with --backend doca.")
    if timestamps == "hardware" and backend != "ebpf":
        raise click.UsageError("--timestamps hardware needs --backend ebpf.")
    if files and not (rotate_size or rotate_time):
        raise click.UsageError("--files needs --rotate-size or --rotate-time.")

    if expression is not None and (hosts or ports or qps or vlans or given("protocols")):
        raise click.UsageError("--filter says it all: leave out --protocol, --host, --port, --qp and --vlan.")

    from dpuflow.errors import DpuflowError, OptionError
    from dpuflow.live.options import DocaOptions, LiveOptions
    from dpuflow.live.output import Rotation
    from dpuflow.live.record import record
    from dpuflow.reports.live import LiveLine, summary_lines

    try:
        if expression is not None:
            from dpuflow.live.expression import translate

            wanted = translate(expression)
            protocols, hosts, ports = wanted.protocols, wanted.hosts, wanted.ports
            qps, vlans = wanted.qps, wanted.vlans
        options = LiveOptions(
            interfaces, snaplen, protocols, hosts, ports, qps, vlans, sample, buffer, hook, mode,
            DocaOptions(peer, copy_by, production, sample_packets), timestamps, promiscuous, group,
        )  # fmt: skip
    except OptionError as error:
        raise click.UsageError(f"{error}.") from None
    if on:
        on_nodes(on, over, path, mode, duration, quiet)
        return

    def take(file: str | None, seconds: float | None, stopped: Callable[[], bool] = lambda: False) -> None:
        with LiveLine(enabled=not quiet and not as_node) as line:
            summary = record(
                options,
                file,
                backend=backend,
                rotation=Rotation(rotate_size, rotate_time, files),
                duration_s=seconds,
                count=count,
                every_second=line.show,
                started=line.started,
                stopped=stopped,
            )
        for text in summary_lines(summary, warnings_only=quiet):
            click.echo(text, err=True)
        if summary.reason is not None:
            raise DpuflowError(summary.reason)

    if as_node:
        from dpuflow.live.node import serve

        with open(0, "rb", buffering=0, closefd=False) as asked:
            serve(take, ending_of(mode), asked, sys.stdout.buffer)
    else:
        take(path, duration)
