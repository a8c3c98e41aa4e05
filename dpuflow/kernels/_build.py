"""All kernels as one shared library that is loaded without Numba (``_ready``).

Each kernel gets an entry that takes its arguments from a row of 64-bit words: numbers as they are,
arrays as the addresses of their objects, whose fields have the same places in all NumPy versions
(PyArrayObject_fields: data, dimensions, strides). Needs a linker; without one Numba goes on as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import numba
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from dpuflow.kernels import _numba, _ready

_DATA, _DIMENSIONS = 16, 32  # bytes into an array's object
_WORD: Final = ir.IntType(64)


def _argument(kind: Any, place: int) -> Any:
    """Argument number ``place`` of type ``kind``, from the row of words."""

    @intrinsic
    def read(typing_context: Any, words: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            word = builder.load(builder.gep(args[0], [_WORD(place)]))
            if not isinstance(kind, types.Array):
                return context.cast(builder, word, types.int64, kind)

            def at(address: Any, offset: int) -> Any:
                return builder.load(builder.inttoptr(builder.add(address, _WORD(offset)), _WORD.as_pointer()))

            array = context.make_array(kind)(context, builder)
            dimensions = at(word, _DIMENSIONS)
            shape = [at(dimensions, 8 * k) for k in range(kind.ndim)]
            step = size = _WORD(context.get_abi_sizeof(context.get_data_type(kind.dtype)))
            strides: list[Any] = []
            for length in reversed(shape):
                strides.insert(0, step)
                step = builder.mul(step, length)
            data = builder.inttoptr(at(word, _DATA), array.data.type)
            populate_array(array, data, shape, strides, size, None)  # type: ignore[no-untyped-call]
            return array._getvalue()

        return kind(words), generate

    return read


def _object_code(dispatcher: Any) -> bytes:
    """Position-independent machine code of a kernel's entry, its symbol alone visible."""
    (signature,) = dispatcher.nopython_signatures
    scope: dict[str, Any] = {"kernel": dispatcher}
    scope |= {f"a{k}": _argument(kind, k) for k, kind in enumerate(signature.args)}
    call = f"kernel({', '.join(f'a{k}(words)' for k in range(len(signature.args)))})"
    result = "0" if signature.return_type == types.void else "result"
    exec(f"def entry(words):\n    result = {call}\n    return {result}\n", scope)
    entry = numba.njit(**_numba.FLAGS)(scope["entry"])
    entry.compile(types.int64(types.CPointer(types.int64)))  # type: ignore[no-untyped-call]
    (compiled,) = entry.overloads.values()
    symbol = _ready.symbol(dispatcher.py_func)
    text = compiled.library.get_llvm_str().replace(compiled.fndesc.llvm_func_name, symbol)
    module = binding.parse_assembly(text)
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name != symbol:
            value.linkage = "internal"
    machine = binding.Target.from_default_triple().create_target_machine(*_processor(), opt=3, reloc="pic")
    _drop_unused(module, machine)
    return machine.emit_object(module)  # type: ignore[no-any-return]


def _processor() -> tuple[str, str]:
    """LLVM's name and features of what is compiled for: what Numba was told, else this processor."""
    config = numba.config
    if config.CPU_NAME is not None:  # type: ignore[attr-defined]
        return config.CPU_NAME, config.CPU_FEATURES or ""  # type: ignore[attr-defined]
    return binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()


def _drop_unused(module: Any, machine: Any) -> None:
    """Remove what the entry does not need: Numba's wrappers for calls from Python."""
    if hasattr(binding, "create_new_module_pass_manager"):
        passes = binding.create_new_module_pass_manager()
        passes.add_global_dead_code_eliminate_pass()
        passes.run(module, binding.create_pass_builder(machine, binding.create_pipeline_tuning_options()))
    else:  # llvmlite before 0.45
        passes = binding.create_module_pass_manager()
        passes.add_global_dce_pass()
        passes.run(module)


def build(target: Path | None = None) -> Path | None:
    """Write the library of all kernels imported so far; None where that is not possible.

    Without ``target`` it goes where it will be looked for, and those of other sources are removed.
    """
    linker = shutil.which(os.environ.get("CC", "cc")) or shutil.which("ld")
    place = target or _ready.library_path()
    if linker is None:
        return None
    try:
        place.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as name:
            objects = []
            for number, kernel in enumerate(_numba.KERNELS):
                path = Path(name, f"{number}.o")
                path.write_bytes(_object_code(kernel.dispatcher))
                objects.append(str(path))
            library = Path(name, place.name)
            nothing_else = [] if linker.endswith("ld") else ["-nostdlib"]
            nothing_else += ["-s"]  # names of inner functions, which tell how Numba counted them
            subprocess.run(
                [linker, "-shared", *nothing_else, "-o", str(library), *objects],
                capture_output=True,
                check=True,
            )
            library.replace(place)
    except (OSError, subprocess.CalledProcessError):
        return None
    if target is None:
        for old in place.parent.glob("-".join(place.name.split("-")[:2]) + "-*.so"):
            if old != place:
                old.unlink(missing_ok=True)
    return place


def compile_all() -> None:
    """Have Numba compile all kernels imported so far, which it keeps in its cache."""
    for kernel in _numba.KERNELS:
        assert kernel.dispatcher


def ship() -> Path:
    """Write the library that a wheel or a Debian package brings, unless it is there.

    In a process of its own, as Numba knows one processor only, and without its cache, so that the same
    sources give the same bytes. Raises CalledProcessError, FileNotFoundError.
    """
    place = _ready.shipped_path()
    for old in place.parent.glob("shipped-*.so"):
        if old != place:
            old.unlink()
    if not place.exists():
        with tempfile.TemporaryDirectory() as cache:
            name, _ = _ready.BASELINE[os.uname().machine]
            told = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": cache}
            command = [sys.executable, "-c", _SHIP, str(place)]
            subprocess.run(command, check=True, env=os.environ | told | {"DPUFLOW_NUMBA": "1"})
    place.stat()
    return place


_SHIP: Final = """
import sys
from pathlib import Path
from dpuflow.kernels import load_all
from dpuflow.kernels._build import build
load_all()
build(Path(sys.argv[1]))
"""


if __name__ == "__main__":
    print(ship())
