"""The programs compiled where they run, by bcc: for those who change them, and where no object fits.

Needs python3-bpfcc, headers of some kernel (only types of its user API matter) and dpuflow's bpf/ folder.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dpuflow.errors import DpuflowError, MissingError
from dpuflow.schema import ring

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SOURCES: Final = Path(__file__).resolve().parents[2] / "bpf"


class Compiled:
    """As ``libbpf.Loaded``, by bcc: the programs of packets.bpf.c for one interface."""

    def __init__(self, programs: tuple[str, ...], settings: NDArray[np.void], maps: dict[str, int]) -> None:
        """Compile and load. Raises MissingError, DpuflowError."""
        try:
            from bcc import BPF
        except ImportError:
            raise MissingError("bcc is not installed: apt-get install python3-bpfcc") from None
        try:
            flags = ["-Wno-everything", *_header_flags()]
            self._module: Any = BPF(text=source_text(settings, maps), cflags=flags)
            kinds = {name: BPF.XDP if name == "dpuflow_xdp" else BPF.SCHED_CLS for name in programs}
            self.fds = {name: int(self._module.load_func(name, kind).fd) for name, kind in kinds.items()}
        except Exception as error:  # bcc raises nothing else
            raise DpuflowError(
                f"bcc cannot compile the programs ({error}): it needs kernel headers"
                " (apt-get install linux-headers-amd64, or -arm64)"
            ) from None

    def close(self) -> None:
        """Give the programs back."""
        self._module.cleanup()


def source_text(settings: NDArray[np.void], maps: dict[str, int]) -> str:
    """packets.bpf.c with its headers, settings and maps written in. Raises MissingError."""
    if not SOURCES.is_dir():
        raise MissingError(f"{SOURCES} not found: --backend bcc compiles the programs from source")
    row = settings[0]
    values = ", ".join(f".{name} = {_literal(row[name])}" for name in ring.SETTINGS.dtype.names or ())
    defines = {
        "DPUFLOW_BCC": "1",
        **{f"DPUFLOW_{name.upper()}_FD": str(fd) for name, fd in maps.items()},
        "DPUFLOW_SETTINGS": f"{{ {values} }}",
    }
    return "".join(f"#define {name} {value}\n" for name, value in defines.items()) + _inlined(
        "packets.bpf.c", set()
    )


def _literal(value: Any) -> str:
    if getattr(value, "shape", ()):
        return "{ " + ", ".join(f"{int(each)}ULL" for each in value) + " }"
    return f"{int(value)}ULL"


def _inlined(name: str, seen: set[str]) -> str:
    """A source file with dpuflow's own headers in place of their names, each once."""
    lines = []
    for line in (SOURCES / name).read_text(encoding="utf-8").splitlines():
        found = re.fullmatch(r'#include "(.*)"', line)
        if not found:
            lines.append(line)
        elif found[1] not in seen:
            seen.add(found[1])
            lines.append(_inlined(found[1], seen))
    return "\n".join(lines) + "\n"


def _header_flags() -> list[str]:
    """Where headers of another kernel are (Debian's two folders), if the running one's are not there."""
    if os.path.exists(f"/lib/modules/{os.uname().release}/build") or "BCC_KERNEL_SOURCE" in os.environ:
        return []
    for folder in sorted(Path("/usr/src").glob("linux-headers-*"), reverse=True):
        common = Path(re.sub(r"-[a-z0-9]+$", "-common", str(folder)))
        arches = list(folder.glob("arch/*/include/generated"))
        if common.is_dir() and arches:
            os.environ["BCC_KERNEL_SOURCE"] = str(common)
            places = [folder / "include", folder / "include/generated/uapi", arches[0], arches[0] / "uapi"]
            return [f"-I{place}" for place in places]
    return []
