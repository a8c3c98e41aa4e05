"""A filter expression as tcpdump's users write it, translated to the filters that the programs have.

In: "roce and (host 10.0.0.1 or host 10.0.0.2) and qp 17". Out: protocols, hosts, ports, QPs and VLANs as
``LiveOptions`` takes them. What these cannot say is refused, with a sentence that says what can be.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import Final

from dpuflow.errors import OptionError
from dpuflow.live.options import address_words
from dpuflow.wire.headers import ROCE_V2_PORT

POSSIBLE: Final = (
    "supported: roce, tcp, any, host ADDR, port N, qp N and vlan N, joined by and; alternatives"
    ' of one kind in parentheses: "roce and (host 10.0.0.1 or host 10.0.0.2) and qp 17"'
)

_All = None  # in place of a set of QPs or ports: whichever
_Kinds = dict[str, "frozenset[int] | None"]
_EVERYTHING: Final[_Kinds] = {"roce": _All, "tcp": _All, "other": _All}
_USUAL: Final[_Kinds] = {"roce": _All, "tcp": _All}


@dataclass(frozen=True)
class Wanted:
    """The fields of LiveOptions that an expression sets."""

    protocols: tuple[str, ...]
    hosts: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    qps: tuple[int, ...] = ()
    vlans: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Term:
    """One condition: of hosts or VLANs a value, else packets by ``kinds``."""

    hosts: tuple[str, ...] = ()
    vlans: tuple[int, ...] = ()
    kinds: _Kinds | None = None

    def what(self) -> str:
        return "host" if self.hosts else "vlan" if self.vlans else "protocol"


class _Reader:
    """The words of an expression, one after the other."""

    def __init__(self, text: str) -> None:
        self._words = re.findall(r"\(|\)|&&|\|\||!|[^\s()&|!]+|.", re.sub(r"\s+", " ", text.lower()))
        self._words = [word for word in self._words if word.strip()]
        self._at = 0

    def peek(self) -> str:
        return self._words[self._at] if self._at < len(self._words) else ""

    def next(self) -> str:
        word = self.peek()
        self._at += 1
        return word

    def took(self, *words: str) -> bool:
        found = self.peek() in words
        self._at += found
        return found


def translate(text: str) -> Wanted:
    """What the expression asks for. Raises OptionError."""
    words = _Reader(text)
    clauses = [_clause(words)]
    while words.took("and", "&&"):
        clauses.append(_clause(words))
    if words.peek() in ("or", "||"):
        if len(clauses) > 1:
            raise _refused("put parentheses around alternatives next to and")
        words = _Reader(f"({text})")
        clauses = [_clause(words)]
    if words.peek():
        raise _refused(f"{words.peek()!r} is not understood")
    return _all_of(clauses)


def _clause(words: _Reader) -> _Term:
    """A term, or alternatives in parentheses."""
    if not words.took("("):
        return _term(words)
    terms = [_clause(words)]
    while words.took("or", "||"):
        terms.append(_clause(words))
    if words.peek() in ("and", "&&"):
        raise _refused("and within parentheses is not supported")
    if not words.took(")"):
        raise _refused("unclosed parenthesis")
    return _any_of(terms)


def _any_of(terms: list[_Term]) -> _Term:
    """What one of the alternatives at least wants."""
    if len({term.what() for term in terms}) > 1:
        raise _refused("alternatives of different kinds are not supported")
    kinds: _Kinds = {}
    for term in terms:
        for kind, values in (term.kinds or {}).items():
            before = kinds.get(kind, frozenset())
            kinds[kind] = _All if values is _All or before is _All else values | before
    return _Term(
        tuple(host for term in terms for host in term.hosts),
        tuple(vlan for term in terms for vlan in term.vlans),
        kinds or None,
    )


def _term(words: _Reader) -> _Term:
    word = words.next()
    if word in ("roce", "rocev2", "infiniband"):
        return _Term(kinds={"roce": _All})
    if word == "any":
        return _Term(kinds=_EVERYTHING)
    if word == "host":
        host = words.next()
        address_words(host)
        return _Term(hosts=(host,))
    if word == "vlan":
        return _Term(vlans=(_number(words, "vlan"),))
    if word == "qp":
        return _Term(kinds={"roce": frozenset({_number(words, "qp")})})
    if word in ("tcp", "udp", "port"):
        return _Term(kinds=_of_port(word, words))
    raise _refused(f"{word!r} is not supported" if word else "unexpected end")


def _of_port(word: str, words: _Reader) -> _Kinds:
    """What ``tcp``, ``udp`` and ``port`` want, with the port that may follow."""
    if word == "tcp" and words.peek() != "port":
        return {"tcp": _All}
    if word == "udp" and words.peek() != "port":
        raise _refused("the only UDP captured is RoCEv2: write roce")
    if word != "port":
        words.next()
    port = _number(words, "port")
    kinds: _Kinds = {} if word == "udp" else {"tcp": frozenset({port})}
    if port == ROCE_V2_PORT and word != "tcp":
        kinds["roce"] = _All
    if not kinds:
        raise _refused("the only UDP captured is RoCEv2: write roce")
    return kinds


def _number(words: _Reader, what: str) -> int:
    word = words.next()
    try:
        return int(word, 0)
    except ValueError:
        raise _refused(f"{what} needs a number, not {word!r}") from None


def _all_of(clauses: list[_Term]) -> Wanted:
    """What all clauses want together."""
    for what in ("host", "vlan"):
        if sum(clause.what() == what for clause in clauses) > 1:
            raise _refused(f"give {what} once, or as alternatives in parentheses: traffic between two of them"
                           " cannot be singled out")  # fmt: skip
    named = [clause.kinds for clause in clauses if clause.kinds is not None]
    kinds = reduce(_both, named) if named else _USUAL
    if not kinds:
        raise _refused("no packet matches all of that")
    protocols = ("any",) if "other" in kinds else tuple(name for name in ("roce", "tcp") if name in kinds)
    return Wanted(
        protocols,
        tuple(dict.fromkeys(chain.from_iterable(clause.hosts for clause in clauses))),
        tuple(sorted(kinds.get("tcp") or ())),
        tuple(sorted(kinds.get("roce") or ())),
        tuple(dict.fromkeys(chain.from_iterable(clause.vlans for clause in clauses))),
    )


def _both(one: _Kinds, other: _Kinds) -> _Kinds:
    """What is of both: kinds with their values, those left without any apart."""
    found: _Kinds = {}
    for kind in one.keys() & other.keys():
        mine, yours = one[kind], other[kind]
        values = yours if mine is _All else mine if yours is _All else mine & yours
        if values is _All or values:
            found[kind] = values
    return found


def _refused(why: str) -> OptionError:
    return OptionError(f"--filter: {why}; {POSSIBLE}")
