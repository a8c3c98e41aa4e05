"""Rank maps: a YAML file in, address -> rank, GPU and host out.

    10.0.0.1: 0                                  # just the rank
    10.0.0.2: {rank: 1, gpu: 3, host: node1}
    fe80::5054:ff:feaa:1: {rank: 1, host: node1} # a second address of the same rank

Several addresses may be of one rank; then host and GPU must agree. Every error names the line.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpuflow.errors import MissingError, OptionError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KEYS = ("rank", "gpu", "host")
MOST_DIGITS = 9  # of a rank: more do not fit the tables that ranks stand in


@dataclass(frozen=True, slots=True)
class Place:
    """Where an address is: ``rank`` in the job, and the GPU and host it belongs to."""

    rank: int | None = None
    gpu: str | None = None
    host: str | None = None

    @property
    def label(self) -> str | None:
        """Host and GPU for people, None where neither is known."""
        parts = [self.host, None if self.gpu is None else f"GPU {self.gpu}"]
        return " ".join(part for part in parts if part) or None


def read_rank_map(file: str) -> dict[str, Place]:
    """Read a rank map; keys are addresses as ``canonical_address`` writes them.

    Raises OptionError with file and line, MissingError without PyYAML, OSError.
    """
    try:
        import yaml
    except ImportError:
        raise MissingError("rank maps are YAML: install PyYAML") from None

    with open(file, encoding="utf-8") as stream:
        try:
            root = yaml.compose(stream, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise OptionError(f"{file}:{line}: not YAML: {error.problem}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise OptionError(f"{file}: not YAML: {str(error).splitlines()[0]}") from None
        except RecursionError:
            raise OptionError(f"{file}: not YAML: nested too deeply") from None
    if root is None:
        raise OptionError(f"{file}: the rank map is empty")
    places: dict[str, Place] = {}
    of_rank: dict[int, tuple[str, Place]] = {}
    for key, value in _pairs(file, root, "the rank map"):
        try:
            address = canonical_address(key.value)
        except ValueError:
            raise _error(file, key, f"{key.value!r} is not an IP address") from None
        if address in places:
            raise _error(file, key, f"{address} is listed twice")
        places[address] = place = _place(file, value)
        first = of_rank.setdefault(place.rank, (address, place)) if place.rank is not None else None
        if first is not None and (first[1].host, first[1].gpu) != (place.host, place.gpu):
            raise _error(file, key, f"rank {place.rank} is at another place than on {first[0]}")
    return places


def read_hosts(file: str = "/etc/hosts") -> dict[str, str]:
    """Addresses of hosts(5) to the first name of each, loopback left out; empty where it cannot be read."""
    found: dict[str, str] = {}
    try:
        with open(file, encoding="utf-8", errors="replace") as stream:
            lines = [line.partition("#")[0].split() for line in stream]
    except OSError:
        return found
    for address, *names in (line for line in lines if len(line) > 1):
        try:
            key = canonical_address(address)
        except ValueError:
            continue
        if not ipaddress.ip_address(key).is_loopback:
            found.setdefault(key, names[0])
    return found


def canonical_address(text: str) -> str:
    """An IPv4 or IPv6 address in its shortest form; IPv4 within IPv6 (::ffff:a.b.c.d) as a.b.c.d.

    Raises ValueError.
    """
    address = ipaddress.ip_address(text)
    mapped = getattr(address, "ipv4_mapped", None)
    return str(address if mapped is None else mapped)


def _place(file: str, node: Any) -> Place:
    if node.id == "scalar":
        return Place(rank=_rank(file, node))
    found: dict[str, Any] = {}
    for key, value in _pairs(file, node, "an address"):
        if key.value not in KEYS:
            raise _error(file, key, f"{key.value!r} is not one of {', '.join(KEYS)}")
        if key.value in found:
            raise _error(file, key, f"{key.value} is given twice")
        if value.id != "scalar" or value.value == "":
            raise _error(file, value, f"{key.value} must be one value")
        found[key.value] = _rank(file, value) if key.value == "rank" else value.value
    if not found:
        raise _error(file, node, f"give at least one of {', '.join(KEYS)}")
    return Place(**found)


def _rank(file: str, node: Any) -> int:
    if not (node.value.isascii() and node.value.isdecimal()):
        raise _error(file, node, f"the rank must be a number from 0, not {node.value!r}")
    if len(node.value) > MOST_DIGITS:
        raise _error(file, node, f"no job has a rank {node.value[:20]}")
    return int(node.value)


def _pairs(file: str, node: Any, what: str) -> list[tuple[Any, Any]]:
    if node.id != "mapping":
        raise _error(file, node, f"{what} must be a mapping, key: value")
    for key, _ in node.value:
        if key.id != "scalar":
            raise _error(file, key, "a key must be plain text")
    pairs: list[tuple[Any, Any]] = node.value
    return pairs


def _error(file: str, node: Any, reason: str) -> OptionError:
    return OptionError(f"{file}:{node.start_mark.line + 1}: {reason}")


def place_of(addresses: list[str], places: Mapping[str, Place]) -> Place:
    """The place of an endpoint: of the first of its addresses that the map lists, else an empty one."""
    for address in addresses:
        if address in places:
            return places[address]
    return Place()


def doubts_about(places: Mapping[str, Place], endpoints: Sequence[Sequence[str]]) -> list[str]:
    """Sentences: what of a rank map does not fit the endpoints seen, each given by its addresses."""
    seen = {address for addresses in endpoints for address in addresses}
    absent = [address for address in places if address not in seen]
    found = []
    if absent and len(absent) == len(places):
        found.append(f"None of the rank map's {len(places)} addresses is in these captures.")
    elif absent:
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        found.append(f"The rank map lists addresses that are in no capture: {', '.join(absent[:3])}{more}.")
    ranks: dict[int, list[str]] = {}
    for addresses in endpoints:
        place = place_of(list(addresses), places)
        if place.rank is not None:
            ranks.setdefault(place.rank, []).append(addresses[0])
    for rank, first in sorted(ranks.items()):
        if len(first) > 1:
            found.append(f"The rank map gives rank {rank} to {len(first)} endpoints: {', '.join(first)}.")
    return found
