"""Where kernels come from: compiled beforehand (``_ready``), else by Numba (``_numba``), or not compiled
at all (``_plain``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpuflow.kernels import _ready

if TYPE_CHECKING:
    from dpuflow.kernels import _numba as source
elif _ready.PLAIN:
    from dpuflow.kernels import _plain as source
elif _ready.LIBRARY is None:
    from dpuflow.kernels import _numba as source
else:
    source = _ready

COMPILED = not _ready.PLAIN

kernel, inner, inlined = source.kernel, source.inner, source.inlined
from_dtype, void = source.from_dtype, source.void
u1, u2, u4, u8 = source.u1, source.u2, source.u4, source.u8
i4, i8, f8 = source.i4, source.i8, source.f8
le16, le32, le64 = source.le16, source.le32, source.le64
be16, be32, be64 = source.be16, source.be32, source.be64
put8, put16, put32, put64 = source.put8, source.put16, source.put32, source.put64
acquire32, acquire64, release64 = source.acquire32, source.acquire64, source.release64
copy32, arranger, DEALT = source.copy32, source.arranger, source.DEALT
deal: Any = source.deal
which: Any = source.which
lowest: Any = source.lowest
least32: Any = source.least32
prefetch, prefetch_far, prefetch_row = source.prefetch, source.prefetch_far, source.prefetch_row
