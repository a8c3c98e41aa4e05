"""CaptureTables of all captures in, Joined out: common endpoints, one clock, one TRANSFER a message.

``common`` numbers endpoints and flows over all captures, ``sightings`` finds the messages that two captures
saw, ``envelope`` fits a line to what a pair's stamps differ by, ``clockgraph`` and ``clockmap`` lay the
pairs' lines over all clocks, ``clocks`` decides what is trusted, ``transfers`` puts it together. Before all
that, ``doubled`` counts once what a capture holds twice, ``sampled`` sets samples aside, ``oneway`` finds
captures of one direction.
"""

from dpuflow.join.doubled import count_once
from dpuflow.join.oneway import one_way
from dpuflow.join.sampled import left_out, set_aside_samples
from dpuflow.join.transfers import join

__all__ = ["count_once", "join", "left_out", "one_way", "set_aside_samples"]
