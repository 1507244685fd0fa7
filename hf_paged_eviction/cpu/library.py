"""The library of functions in C, if a C compiler is at hand.

With operators of torch, an eager step costs what its many small operators cost. The library is compiled when a process
first needs it, which takes about a second. Nothing stays on disk.
"""

import ctypes
import os
import shlex
import shutil
import subprocess
import warnings
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

_SOURCE = Path(__file__).with_name("attend.c")
#: Sums may be taken in any order; numbers that are infinite or none stay what they are.
_FLAGS = (
    "-std=gnu11 -O3 -shared -fPIC -ffp-contract=fast "
    "-fno-math-errno -fno-trapping-math -fno-signed-zeros -fassociative-math"
).split()
#: What compilers may lack, most wanted first.
_EXTRAS: tuple[list[str], ...] = ["-march=native", "-fopenmp"], ["-march=native"], ["-fopenmp"], []
#: A compiler that takes so long does not answer.
_SECONDS = 60


def missing() -> str | None:
    """Why there is no library; None = there is one. Compiles it at the first call."""
    return reason if isinstance(reason := _library(), str) else None


def library() -> ctypes.CDLL:
    """The library.

    Raises:
        RuntimeError: it is `missing`.
    """
    if isinstance(found := _library(), str):
        raise RuntimeError(f"Functions in C cannot run: {found}.")
    return found


@cache
def _library() -> ctypes.CDLL | str:
    try:
        compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or ""]
        if shutil.which(compiler[0]) is None:
            return "there is no C compiler (set CC, or put cc on the path)"
        with TemporaryDirectory() as folder:
            return _compiled(compiler, Path(folder) / "attend.so")
    except Exception as error:  # whatever a compiler, a folder, or a library that is none may raise
        return _refused(f"{type(error).__name__}: {error}")


def _compiled(compiler: list[str], target: Path) -> ctypes.CDLL | str:
    for extras in _EXTRAS:
        words = [*compiler, *_FLAGS, *extras, str(_SOURCE), "-o", str(target), "-lm"]
        ran = subprocess.run(words, capture_output=True, stdin=subprocess.DEVNULL, timeout=_SECONDS)
        if ran.returncode == 0:
            library = ctypes.CDLL(str(target))
            library.scratch_size.restype = ctypes.c_int64
            library.attend.restype = library.attend_plain.restype = library.decode.restype = None
            return library
    return _refused(ran.stderr.decode("utf-8", "replace").strip()[-500:])


def _refused(reason: str) -> str:
    warnings.warn(
        f"Attention to few bits could not be compiled, so operators of torch do it, in more time: {reason}",
        stacklevel=2,
    )
    return f"the C compiler refused: {reason}"
