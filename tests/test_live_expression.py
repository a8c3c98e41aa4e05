"""--filter: expressions, and refusals that say what is possible."""

from __future__ import annotations

import pytest

from dpuflow.errors import OptionError
from dpuflow.live.expression import POSSIBLE, Wanted, translate

BOTH = ("roce", "tcp")
A, B = "10.0.0.1", "2001:db8::1"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("roce", Wanted(("roce",))),
        ("tcp", Wanted(("tcp",))),
        ("any", Wanted(("any",))),
        ("roce or tcp", Wanted(BOTH)),
        (f"host {A}", Wanted(BOTH, hosts=(A,))),
        (f"roce and host {A} and qp 17", Wanted(("roce",), hosts=(A,), qps=(17,))),
        (f"ROCE && (host {A} || host {B})", Wanted(("roce",), hosts=(A, B))),
        ("(qp 0x11 or qp 18)", Wanted(("roce",), qps=(17, 18))),
        ("qp 18 or qp 17", Wanted(("roce",), qps=(17, 18))),
        ("tcp port 5000 and vlan 7", Wanted(("tcp",), ports=(5000,), vlans=(7,))),
        ("udp port 4791", Wanted(("roce",))),
        ("port 4791", Wanted(BOTH, ports=(4791,))),
        ("roce or port 5000", Wanted(BOTH, ports=(5000,))),
        ("(qp 17 or port 5000) and (vlan 7 or vlan 8)", Wanted(BOTH, (), (5000,), (17,), (7, 8))),
        ("(roce or tcp) and qp 17", Wanted(("roce",), qps=(17,))),
        ("roce or qp 17", Wanted(("roce",))),
        ("any and port 5000", Wanted(("tcp",), ports=(5000,))),
        ("(qp 1 or qp 2) and (qp 2 or qp 3)", Wanted(("roce",), qps=(2,))),
    ],
)
def test_what_is_translated(text: str, wanted: Wanted) -> None:
    assert translate(text) == wanted


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "unexpected end"),
        ("roce and", "unexpected end"),
        (f"src host {A}", "'src' is not supported"),
        ("not tcp", "'not' is not supported"),
        ("!tcp", "'!' is not supported"),
        ("tcp[13] == 2", "'tcp[13]' is not supported"),
        ("net 10.0.0.0/8", "'net' is not supported"),
        ("udp", "the only UDP captured is RoCEv2: write roce"),
        ("udp port 53", "the only UDP captured is RoCEv2: write roce"),
        (f"roce and host {A} or host {B}", "put parentheses around alternatives"),
        (f"host {A} or tcp", "alternatives of different kinds are not supported"),
        (f"host {A} and host {B}", "give host once"),
        ("(roce and qp 5)", "and within parentheses is not supported"),
        ("(roce or tcp", "unclosed parenthesis"),
        ("roce)", "')' is not understood"),
        ("roce tcp", "'tcp' is not understood"),
        ("tcp and qp 5", "no packet matches all of that"),
        ("qp 1 and qp 2", "no packet matches all of that"),
        ("qp all", "qp needs a number, not 'all'"),
    ],
)
def test_what_is_refused(text: str, why: str) -> None:
    with pytest.raises(OptionError) as refused:
        translate(text)
    assert str(refused.value).startswith(f"--filter: {why}")
    assert str(refused.value).endswith(POSSIBLE)
