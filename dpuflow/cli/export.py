"""``dpuflow export``: a finding's packets as a capture of their own."""

from __future__ import annotations

import click

EPILOG = """\b
Examples:
  The result, then the packets that show its straggler:
    dpuflow analyze node*.pcapng --json result.json
    dpuflow export straggler --from result.json -w straggler.pcapng
    wireshark straggler.pcapng

The captures must still be where they were analysed. Packets carry the verdict
as pcapng comments (Wireshark: pkt_comment); pcap has none."""


@click.command(epilog=EPILOG)
@click.argument("finding")
@click.option(
    "--from",
    "result_file",
    metavar="RESULT.json",
    required=True,
    help="The result, as dpuflow analyze --json wrote it.",
)
@click.option(
    "-w",
    "--write",
    "path",
    metavar="FILE",
    required=True,
    help="What to write: .pcapng, or .pcap (no comments), .gz, .zst.",
)
def export(finding: str, result_file: str, path: str) -> None:
    """Write the packets behind a FINDING, with the verdict as comments.

    FINDING is the id of a finding in the result, or its condition (straggler, packet_loss).
    """
    from dpuflow.cli.targets import check_target
    from dpuflow.export import export_finding, read_result

    result = read_result(result_file)
    check_target(
        path,
        "-w",
        [result_file, *(f for each in result["captures"] for f in each["files"])],
        makes_captures=True,
    )
    click.echo(f"{path}: {export_finding(result, finding, path):,} packets", err=True)
