"""A Wireshark post-dissector, in Lua: beside each packet its message and collective as dpuflow numbers them.

In: an ``Analysis`` and the ``Marks`` of its captures. Out: one script, which knows by the stamp of a file's
first packet which of the captures it is beside (Wireshark Developer's Guide, chapter 11).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from dpuflow.quantities import duration, name_of, size
from dpuflow.reports.output import replacing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpuflow.marks import Marks
    from dpuflow.results import Analysis, Collective


def write_lua(result: Analysis, marks: Sequence[Marks], target: str) -> None:
    """Write the script to ``target``, whole or not at all. Raises OSError."""
    with replacing(target) as file:
        file.writelines(lua_lines(result, marks))


def lua_lines(result: Analysis, marks: Sequence[Marks]) -> Iterator[str]:
    """The script in pieces."""
    yield _HEAD
    yield "local collectives = {\n"
    for each in result.collectives:
        yield f"[{each.id}]={{{_text(each.op)},{_text(_about(result, each))}}},\n"
    yield "}\nlocal captures = {\n"
    for capture in marks:
        if capture.first_ns is None:
            continue
        yield f'["{capture.first_ns // 10**9}.{capture.first_ns % 10**9:09}"]={{\n'
        for flow, found in capture.flows.items():
            rows = ",".join(
                f"{{{m.first},{m.last},{m.message},{-1 if m.collective is None else m.collective}}}"
                for m in found
            )
            yield f"[{_text(flow)}]={{{rows}}},\n"
        yield "},\n"
    yield "}\n"
    yield _TAIL


def _text(value: str) -> str:
    return json.dumps(value)


def _about(result: Analysis, collective: Collective) -> str:
    """``all_reduce of 256 KiB (ring), last: 10.0.0.3 by 10.1 ms``."""
    text = collective.op + (f" of {size(collective.bytes)}" if collective.bytes else "")
    text += "" if collective.algorithm == "unknown" else f" ({collective.algorithm})"
    known = [rank for rank in collective.ranks if rank.lateness_ns and rank.bound in ("exact", "at_least")]
    if not known:
        return text
    last = max(known, key=lambda rank: rank.lateness_ns or 0)
    least = "at least " if last.bound == "at_least" else ""
    return f"{text}, last: {name_of(result.endpoints[last.endpoint])} by {least}{duration(last.lateness_ns)}"


_HEAD = """-- Made by dpuflow for one result. Wireshark: -X lua_script:FILE, or in the plugins folder.
-- Fields: dpuflow.message, dpuflow.collective, dpuflow.operation, dpuflow.about
"""

_TAIL = """
local proto = Proto("dpuflow", "dpuflow")
local message = ProtoField.uint32("dpuflow.message", "Message")
local collective = ProtoField.uint32("dpuflow.collective", "Collective")
local operation = ProtoField.string("dpuflow.operation", "Operation")
local about = ProtoField.string("dpuflow.about", "About it")
proto.fields = {message, collective, operation, about}

local epoch = Field.new("frame.time_epoch")
local ends = {{Field.new("ip.src"), Field.new("ip.dst")}, {Field.new("ipv6.src"), Field.new("ipv6.dst")}}
local sport, dport = Field.new("tcp.srcport"), Field.new("tcp.dstport")
local qp = Field.new("infiniband.bth.destqp")
local flows = nil

local function key()
  for _, pair in ipairs(ends) do
    local src, dst = pair[1](), pair[2]()
    if src and dst then
      local both = tostring(src.value) .. ">" .. tostring(dst.value)
      if qp() then return both .. " qp " .. string.format("%d", qp().value) end
      if sport() then return string.format("%s tcp %d %d", both, sport().value, dport().value) end
    end
  end
end

-- Messages of a flow may overlap where packets came out of order: the last one that began is meant.
local function find(marks, number)
  local low, high = 1, #marks
  while low <= high do
    local middle = math.floor((low + high) / 2)
    if marks[middle][1] <= number then low = middle + 1 else high = middle - 1 end
  end
  for at = high, math.max(high - 8, 1), -1 do
    if marks[at] and marks[at][2] >= number then return marks[at] end
  end
end

function proto.dissector(buffer, pinfo, tree)
  if pinfo.number == 1 then
    local stamp = epoch().value
    flows = captures[string.format("%d.%09d", stamp.secs, stamp.nsecs)]
  end
  if not flows then return end
  local name = key()
  local marks = name and flows[name]
  local mark = marks and find(marks, pinfo.number)
  if not mark then return end
  local branch = tree:add(proto, "dpuflow, message " .. mark[3])
  branch:add(message, mark[3])
  local of = collectives[mark[4]]
  if of then
    branch:add(collective, mark[4])
    branch:add(operation, of[1])
    branch:add(about, of[2])
    branch:append_text(", collective " .. mark[4] .. ": " .. of[2])
  end
end

register_postdissector(proto, true)
"""
