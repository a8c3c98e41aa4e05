"""Levels that rules of matching share, each named once with its reason (docs/theory/rules.md lists all)."""

from __future__ import annotations

from typing import Final

MOST: Final = 0.9
"""Share of cases that must bear a reading out. What disturbs single ones (a late stamp, a message sent again
or lost from the capture, the capture's ends) has one in ten; what explains less has not understood its
messages."""
RARE: Final = 0.1
"""Share of cases that may speak against a reading: the rest of ``MOST``."""
TWICE: Final = 2
"""How often something must have been seen: what happened once may be an accident, or a wrong time."""
