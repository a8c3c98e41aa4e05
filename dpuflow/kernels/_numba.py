"""Kernels by Numba: compiler flags, the cache of machine code, unaligned loads.

``kernel(signature)`` makes a function that Python calls: compiled once for that signature and kept
on disk. ``inner`` makes one that only kernels call. A load reads the bytes at any offset of a byte
array as one unsigned number, without bounds or wrap-around checks: the caller has checked.
"""

from __future__ import annotations

from threading import Event, Lock, Thread
from time import monotonic, process_time
from typing import TYPE_CHECKING, Any, Final

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dpuflow.kernels import _ready, when_compiling

if TYPE_CHECKING:
    from collections.abc import Callable

FLAGS: Final[dict[str, Any]] = {
    "nogil": True,
    "boundscheck": False,
    "error_model": "numpy",
    "fastmath": False,
    "_nrt": False,  # nothing is allocated: no counting of references
}

from_dtype = numba.from_dtype
u1, u2, u4, u8 = types.uint8, types.uint16, types.uint32, types.uint64
i4, i8, f8 = types.int32, types.int64, types.float64
void = types.void


class Compiled:
    """A kernel for exactly one signature, which Numba compiles, or loads from its cache, at the first call.

    So a capture of TCP does not wait for what only RoCE needs: the three parsers take ten seconds each.
    """

    def __init__(self, function: Callable[..., Any], signature: Any) -> None:
        self.function, self.signature = function, signature
        self.ready: Any = None
        self.lock = Lock()

    @property
    def dispatcher(self) -> Any:
        """Numba's own object, compiled."""
        with self.lock:  # several threads read
            if self.ready is None:
                self.ready = self._compile()
        return self.ready

    def _compile(self) -> Any:
        dispatcher = numba.njit(**FLAGS)(self.function)
        helper = _ready.beside.pop(_ready.symbol(self.function), None)
        try:
            dispatcher.enable_caching()
            # Numba looks at the kernel's own file; what it takes from others would go stale unnoticed.
            dispatcher._cache._cache_file._source_stamp = (_ready.source_stamp(),)
            if helper is not None:
                helper.wait()  # it may be done with this kernel sooner than this process would be
        except RuntimeError:
            pass  # no folder to write to: it is compiled anew in each process
        done = Event()
        Thread(target=_watch, args=(done,), daemon=True).start()
        try:
            dispatcher.compile(self.signature)
        finally:
            done.set()
        dispatcher.disable_compile()
        return dispatcher

    def __call__(self, *arguments: Any) -> Any:
        return (self.ready or self.dispatcher)(*arguments)


KERNELS: list[Compiled] = []
"""All kernels so far, for ``_build``."""
SLOW_S: Final = 1.0
"""A kernel that takes more CPU is not in the cache: whoever waits is told so. Loading one takes 20 ms."""
LONG_S: Final = 5.0
"""So does one that takes longer: on a busy machine the compiler gets little CPU."""


def _watch(done: Event) -> None:
    """Call those who want to know (``when_compiling``) for as long as a kernel compiles."""
    number = sum(kernel.ready is not None for kernel in KERNELS) + 1
    used_s, begun_s = process_time(), monotonic()
    while not done.wait(SLOW_S / 4):
        took_s = monotonic() - begun_s
        if process_time() - used_s > SLOW_S or took_s > LONG_S:
            for tell in when_compiling:
                tell(number, took_s)


def kernel(signature: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function that Python calls, for exactly this signature; releases the GIL."""

    def named(function: Callable[..., Any]) -> Callable[..., Any]:
        KERNELS.append(Compiled(function, signature))
        return KERNELS[-1]

    return named


INNER: Final = FLAGS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Nobody calls these from Python or C: without entries for that they compile in two thirds of the time."""


def inner(function: Callable[..., Any]) -> Any:
    """A function that only kernels call; it becomes part of each of them.

    Compiled once for all constants that it is called with (Numba would compile it anew for each), and for
    narrow and wide signed numbers alike: half of a kernel's compile time. LLVM still folds constants in.
    """
    dispatcher = numba.njit(**INNER)(function)
    template = dispatcher.get_call_template

    def get_call_template(args: Any, kws: Any) -> Any:
        return template(tuple(map(_plain, args)), {name: _plain(kind) for name, kind in kws.items()})

    dispatcher.get_call_template = get_call_template
    return dispatcher


def _plain(kind: Any) -> Any:
    """The type that a function is compiled for when called with ``kind``."""
    plain: Any = types.unliteral(kind)  # type: ignore[no-untyped-call]
    return types.int64 if getattr(plain, "signed", False) else plain


inlined = numba.njit(**INNER, forceinline=True)
"""The same for a kernel's hot loop: a call costs some thirty moves, since arrays pass as seven words."""


def _loader(bits: int, swap: bool) -> Callable[..., int]:
    """A load of ``bits`` bits at any byte offset; swapped where the data is big endian."""

    @intrinsic
    def load(typing_context: Any, data: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            array = context.make_array(signature.args[0])(context, builder, args[0])
            place = builder.gep(array.data, [args[1]])
            number = ir.IntType(bits)
            value = builder.load(builder.bitcast(place, number.as_pointer()), align=1)
            if swap:
                value = builder.bswap(value)
            return value if bits == 64 else builder.zext(value, ir.IntType(64))

        return types.int64(data, types.int64), generate

    return load


le16, le32, le64 = _loader(16, False), _loader(32, False), _loader(64, False)
be16, be32, be64 = _loader(16, True), _loader(32, True), _loader(64, True)


def _storer(bits: int) -> Callable[..., None]:
    """A store of the low ``bits`` bits at any byte offset, in the machine's own byte order."""

    @intrinsic
    def store(typing_context: Any, data: Any, at: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            array = context.make_array(signature.args[0])(context, builder, args[0])
            place = builder.gep(array.data, [args[1]])
            number = ir.IntType(bits)
            value = args[2] if bits == 64 else builder.trunc(args[2], number)
            builder.store(value, builder.bitcast(place, number.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(data, types.int64, types.int64), generate

    return store


put8, put16, put32, put64 = _storer(8), _storer(16), _storer(32), _storer(64)


def _acquirer(bits: int) -> Callable[..., int]:
    """A load at an aligned offset that nothing after it may overtake: another processor writes there."""

    @intrinsic
    def acquire(typing_context: Any, data: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            array = context.make_array(signature.args[0])(context, builder, args[0])
            place = builder.gep(array.data, [args[1]])
            number = ir.IntType(bits)
            value = builder.load_atomic(builder.bitcast(place, number.as_pointer()), "acquire", bits // 8)
            return value if bits == 64 else builder.zext(value, ir.IntType(64))

        return types.int64(data, types.int64), generate

    return acquire


acquire32, acquire64 = _acquirer(32), _acquirer(64)


def _releaser() -> Callable[..., None]:
    """A store of 64 bits at an aligned offset, behind which nothing before it may be delayed."""

    @intrinsic
    def release(typing_context: Any, data: Any, at: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            array = context.make_array(signature.args[0])(context, builder, args[0])
            place = builder.bitcast(builder.gep(array.data, [args[1]]), ir.IntType(64).as_pointer())
            builder.store_atomic(args[2], place, "release", 8)
            return context.get_dummy_value()

        return types.void(data, types.int64, types.int64), generate

    return release


release64 = _releaser()


def _copier(size: int) -> Callable[..., None]:
    """A copy of ``size`` bytes from one byte array to another, at any offsets, in one move."""

    @intrinsic
    def copy(typing_context: Any, target: Any, to: Any, data: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            vector = ir.VectorType(ir.IntType(8), size).as_pointer()
            places = []
            for k in (0, 2):
                array = context.make_array(signature.args[k])(context, builder, args[k])
                places.append(builder.bitcast(builder.gep(array.data, [args[k + 1]]), vector))
            builder.store(builder.load(places[1], align=1), places[0], align=1)
            return context.get_dummy_value()

        return types.void(target, types.int64, data, types.int64), generate

    return copy


copy32 = _copier(32)


def arranger(*words: tuple[int, ...]) -> Callable[..., None]:
    """A copy of 16 bytes at any offsets in another order: ``words`` names each byte's place, -1 for zero."""
    order = [16 if place < 0 else place for word in words for place in word]

    @intrinsic
    def arrange(typing_context: Any, target: Any, to: Any, data: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            vector = ir.VectorType(ir.IntType(8), 16)
            to, source = (
                builder.bitcast(_place(context, builder, signature, args, k), vector.as_pointer())
                for k in (0, 2)
            )
            places = ir.Constant(ir.VectorType(ir.IntType(32), 16), order)
            value = builder.shuffle_vector(builder.load(source, align=1), ir.Constant(vector, None), places)
            builder.store(value, to, align=1)
            return context.get_dummy_value()

        return types.void(target, types.int64, data, types.int64), generate

    return arrange


def _place(context: Any, builder: Any, signature: Any, args: Any, k: int) -> Any:
    """The address in array argument ``k`` at the offset that follows it."""
    array = context.make_array(signature.args[k])(context, builder, args[k])
    return builder.gep(array.data, [args[k + 1]])


DEALT: Final = 16
"""Rows that ``deal`` takes."""


@intrinsic
def deal(typing_context: Any, data: Any, a: Any, b: Any, c: Any, d: Any, at: Any) -> Any:
    """``DEALT`` rows of four 32-bit numbers at ``at`` to four columns, at ``a``, ``b``, ``c`` and ``d``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        word = ir.IntType(32)

        def address(offset: Any, count: int) -> Any:
            return builder.bitcast(builder.gep(array.data, [offset]), ir.VectorType(word, count).as_pointer())

        rows = builder.load(address(args[5], 4 * DEALT), align=1)
        nothing = ir.Constant(rows.type, ir.Undefined)
        for k in range(4):
            places = ir.Constant(ir.VectorType(word, DEALT), [4 * row + k for row in range(DEALT)])
            column = builder.shuffle_vector(rows, nothing, places)
            builder.store(column, address(args[1 + k], DEALT), align=1)
        return context.get_dummy_value()

    return types.void(data, *[types.int64] * 5), generate


@intrinsic
def which(typing_context: Any, data: Any, at: Any, bits: Any) -> Any:
    """Of 64 32-bit numbers at ``at`` those that have any of ``bits``, as one bit each."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.IntType(32), 64)
        place = builder.bitcast(_place(context, builder, signature, args, 0), vector.as_pointer())
        wanted = builder.trunc(args[2], ir.IntType(32))
        single = builder.insert_element(ir.Constant(vector, ir.Undefined), wanted, ir.IntType(32)(0))
        every = builder.shuffle_vector(
            single, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), 64), None)
        )
        found = builder.and_(builder.load(place, align=1), every)
        return builder.bitcast(builder.icmp_unsigned("!=", found, ir.Constant(vector, None)), ir.IntType(64))

    return types.int64(data, types.int64, types.int64), generate


@intrinsic
def lowest(typing_context: Any, bits: Any) -> Any:
    """The number of the lowest bit that is set."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(1))

    return types.int64(types.int64), generate


@intrinsic
def least32(typing_context: Any, a: Any, b: Any) -> Any:
    """The lesser of two numbers as 32-bit integers; the compiler then need not take them for longer ones."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, y = (builder.trunc(arg, ir.IntType(32)) for arg in args)
        return builder.sext(builder.select(builder.icmp_signed("<", x, y), x, y), ir.IntType(64))

    return types.int64(types.int64, types.int64), generate


def _prefetcher(nearness: int) -> Callable[..., None]:
    """Ask for the cache line at an offset, which may lie outside the array."""

    @intrinsic
    def fetch(typing_context: Any, data: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            array = context.make_array(signature.args[0])(context, builder, args[0])
            place = builder.gep(array.data, [args[1]])
            word = ir.IntType(32)
            byte = ir.IntType(8).as_pointer()
            function = builder.module.declare_intrinsic(
                "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, word, word, word])
            )
            builder.call(function, [place, word(0), word(nearness), word(1)])
            return context.get_dummy_value()

        return types.void(data, types.int64), generate

    return fetch


prefetch, prefetch_far = _prefetcher(3), _prefetcher(2)
"""Into the first-level cache, or only into the second."""


@intrinsic
def prefetch_row(typing_context: Any, rows: Any, row: Any) -> Any:
    """Ask for the cache line where a row of an array starts, which may lie outside the array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        word, byte = ir.IntType(32), ir.IntType(8).as_pointer()
        place = builder.bitcast(builder.gep(array.data, [args[1]]), byte)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        )
        builder.call(function, [place, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(rows, types.int64), generate
