"""Compiles the library.

Needs the standard library alone: it also runs while the package is being installed.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "cpp"
BLAKE3 = Path(__file__).parent / "blake3"
"""The hash, as its authors publish it."""
BLAKE3_FILES = ("blake3.c", "blake3_dispatch.c", "blake3_portable.c")
BLAKE3_FILES_OF = {
    "x86_64": tuple(f"blake3_{kind}_x86-64_unix.S" for kind in ("sse2", "sse41", "avx2", "avx512")),
    "aarch64": ("blake3_neon.c",),
}
"""More of them, by machine."""
FLAGS = ("-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-pthread")
LANGUAGE_FLAGS = {
    ".cpp": ("-std=c++17",),
    ".c": ("-x", "c"),
    ".S": ("-x", "assembler-with-cpp"),
}
LINK_FLAGS = (
    "-shared",
    "-pthread",
    "-Wl,-Bsymbolic",
    "-static-libstdc++",
    "-static-libgcc",
    "-ldl",
)
COMPILERS = ("g++", "c++", "clang++")
COMPILE_DEADLINE_S = 600.0


class CannotCompile(Exception):
    """There is no library and none can be made here; the message says why."""


def library_name() -> str:
    """The library's file name, another one for other sources: a stale one is never loaded."""
    digest = hashlib.sha256("\0".join((*FLAGS, *LINK_FLAGS, platform.machine())).encode())
    for source in (*sorted(SOURCES.iterdir()), *sorted(BLAKE3.iterdir())):
        if source.suffix in (*LANGUAGE_FLAGS, ".h"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return f"libpilotlight_native-{digest.hexdigest()[:16]}.so"


def sources() -> tuple[Path, ...]:
    """What is compiled."""
    blake3 = (*BLAKE3_FILES, *BLAKE3_FILES_OF.get(platform.machine(), ()))
    return (*sorted(SOURCES.glob("*.cpp")), *(BLAKE3 / name for name in blake3))


def compiler() -> str | None:
    """The C++ compiler: what CXX names, or the first that is installed."""
    wanted = os.environ.get("CXX")
    return (
        shutil.which(wanted) if wanted else next(filter(None, map(shutil.which, COMPILERS)), None)
    )


def compile_library(target: Path) -> None:
    """Makes the library, whole or not at all; nothing, if it is there.

    Raises:
        CannotCompile: there is no compiler, it refuses, or the folder takes no file.
    """
    if target.exists():
        return
    found = compiler()
    if found is None:
        raise CannotCompile(
            f"no C++ compiler: none of {', '.join(COMPILERS)} is installed, and CXX names none (apt-get install g++)"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".compiling-") as scratch:
            objects = [str(Path(scratch) / f"{source.stem}.o") for source in sources()]
            commands = [
                [found, *FLAGS, *LANGUAGE_FLAGS[source.suffix], "-c", str(source), "-o", made]
                for source, made in zip(sources(), objects, strict=True)
            ]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(_run, commands))
            made = Path(scratch) / target.name
            _run([found, *objects, "-o", str(made), *LINK_FLAGS])
            made.rename(target)
    except subprocess.TimeoutExpired as error:
        raise CannotCompile(f"{found} takes longer than {COMPILE_DEADLINE_S:g} s") from error
    except OSError as error:
        raise CannotCompile(f"{target.parent} takes no library: {error}") from error


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMPILE_DEADLINE_S, check=False
    )
    if done.returncode != 0:
        raise CannotCompile(f"{command[0]} fails: {done.stderr.strip()[-1500:]}")
