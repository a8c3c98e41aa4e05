"""Write tests/corpus again: packets that together take every step that the plain parser can take.

    python tools/corpus.py [ROUNDS]

Good packets are changed by chance (``mutants``); one is kept where it makes the parser go from a line to
another as none did before, ends in a Kind or has an opcode that is new. To be run after a change to
``naive_parse``.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

HOME = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(HOME), str(HOME / "tests")]

import mutants  # noqa: E402
import mutations  # noqa: E402
import naive_parse  # noqa: E402

if TYPE_CHECKING:
    from types import FrameType

LONGEST = 220  # bytes of a packet: the corpus is small
_CODE = {f.__code__ for f in vars(naive_parse._Packet).values() if hasattr(f, "__code__")}


class Steps:
    """The steps from line to line that the parser takes with a packet."""

    def __init__(self) -> None:
        self.taken: set[Any] = set()
        self._last: tuple[str, int] | None = None

    def of(self, record: naive_parse.Record) -> set[Any]:
        self.taken, self._last = set(), None
        sys.settrace(self._enter)
        try:
            row = naive_parse.packet(record)
        finally:
            sys.settrace(None)
        return self.taken | {(record.link, row.kind), ("opcode", row.opcode)}

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._line if frame.f_code in _CODE else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            here = (frame.f_code.co_name, frame.f_lineno)
            self.taken.add((self._last, here))
            self._last = here
        return self._line


def main() -> None:
    rounds, rng = int(sys.argv[1]) if len(sys.argv) > 1 else 60, Random(4)
    files = sorted(HOME.glob("traces/*/node0.pcap.gz"))
    heads = tuple(mutations.head(gzip.decompress(path.read_bytes()), 60) for path in files)
    steps, seen, tried = Steps(), set(), 0
    kept: dict[int, list[tuple[bytes, int]]] = {}
    for _ in range(rounds):
        for link in sorted(set(mutants.LINKS)):
            frames = mutants.pool(link, heads)
            for _ in range(120 if link == 1 else 12):
                frame, claimed = mutants.claimed(rng, mutants.mutant(rng, frames))
                tried += 1
                if len(frame) <= LONGEST:
                    fresh = steps.of(naive_parse.Record(0, 0, 0, claimed, frame, link)) - seen
                    if fresh:
                        seen |= fresh
                        kept.setdefault(link, []).append((frame, claimed))
    folder = HOME / "tests" / "corpus"
    folder.mkdir(exist_ok=True)
    for link, packets in kept.items():
        (folder / f"link{link}.pcap").write_bytes(mutants.capture_of(link, packets))
    print(f"{sum(map(len, kept.values()))} of {tried} packets kept, {len(seen)} steps, kinds and opcodes")


if __name__ == "__main__":
    main()
