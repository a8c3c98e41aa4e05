"""A trace of PyTorch's profiler in, the rank's collectives out: kernels, whose times are the GPU's."""

from __future__ import annotations

from typing import Any

from dpuflow.recorded.calls import BYTES, Call, Recorded, bytes_of, op_of


def read_kineto(file: str, trace: dict[str, Any]) -> Recorded:
    """Kernels of NCCL; where a trace has none, what the host called (``record_param_comms``)."""
    told = trace.get("distributedInfo") or {}
    base = int(trace.get("baseTimeNanoseconds") or 0)
    calls = [call for each in _events(trace) if (call := _call(each, base)) is not None]
    calls.sort(key=lambda call: call.begin_ns or 0)
    rank = told.get("rank")
    return Recorded(file, "a trace of PyTorch's profiler", None if rank is None else int(rank), calls)


def _events(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The events that calls are read from."""
    events = [each for each in trace["traceEvents"] if isinstance(each, dict) and each.get("ph") == "X"]
    kernels = [each for each in events if each.get("cat") == "kernel" and "nccl" in str(each["name"]).lower()]
    return kernels or [each for each in events if each.get("name") == "record_param_comms"]


def _call(event: dict[str, Any], base_ns: int) -> Call | None:
    args = event.get("args") or {}
    op = op_of(str(args.get("Collective name") or event["name"]))
    if op is None:
        return None
    begin = base_ns + round(float(event["ts"]) * 1e3)
    element = BYTES.get(str(args.get("dtype", "")).lower())
    size = bytes_of(op, args.get("In msg nelems"), args.get("Out msg nelems"), element)
    return Call(op, size, begin, begin + round(float(event.get("dur") or 0) * 1e3))
