"""Names and sentences fit to be shown: whatever a rank map, a file name or a packet put into them.

In: texts of a result. Out: the same without characters that steer a terminal or turn the order of a line
(Unicode's Cc, Cf and line separators), and no longer than a reader would read.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from dpuflow.results import Analysis

LONGEST_NAME: Final = 64
LONGEST_SENTENCE: Final = 1000
_STEERING: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def clean(text: str, most: int = LONGEST_SENTENCE) -> str:
    """``text`` with U+FFFD for each steering character, and its middle left out where it is too long."""
    text = _STEERING.sub("\ufffd", text)
    if len(text) <= most:
        return text
    return f"{text[: most - most // 3 - 1]}\u2026{text[-(most // 3) :]}"


def tidied(result: Analysis) -> Analysis:
    """The same result with names fit to be shown; sentences are cleaned where they are written."""
    endpoints = [
        replace(
            each,
            address=clean(each.address, LONGEST_NAME),
            addresses=[clean(text, LONGEST_NAME) for text in each.addresses],
            label=None if each.label is None else clean(each.label, LONGEST_NAME),
            host=None if each.host is None else clean(each.host, LONGEST_NAME),
        )
        for each in result.endpoints
    ]
    captures = [
        replace(
            each,
            vantage=clean(each.vantage, LONGEST_NAME),
            files=[clean(file, 4 * LONGEST_NAME) for file in each.files],
            warnings=[clean(text) for text in each.warnings],
        )
        for each in result.captures
    ]
    findings = [
        replace(
            each,
            summary=clean(each.summary),
            advice=clean(each.advice),
            alternatives=[clean(text) for text in each.alternatives],
            consists_of=[replace(part, summary=clean(part.summary)) for part in each.consists_of],
        )
        for each in result.findings
    ]
    limits = [clean(sentence) for sentence in result.limits]
    return replace(result, endpoints=endpoints, captures=captures, findings=findings, limits=limits)
