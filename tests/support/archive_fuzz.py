"""Archives of graphs and kernel images, mutated by the thousand: ``make fuzz-archives``.

The parser is compiled with the sanitizers of addresses and of undefined behaviour, where the
compiler has them, around a driver that counts its calls.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from graph_archives import ImageMaker, archive, archive_of_all_kinds

from pilotlight.native.building import SOURCES, compiler
from pilotlight.native.pointers import (
    PointerTable,
    RecordedAllocation,
    Word,
    nodes_of,
    with_pointers,
)

HARNESS = Path(__file__).with_suffix(".cpp")
PARTS = (
    "archive",
    "driver",
    "dump",
    "graph_driver",
    "images",
    "kernels",
    "launch_list",
    "pointers",
    "prune",
    "rebuild",
)
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
COMPILE_S, RUN_S = 300, 3600


def compile_fuzzer(
    folder: Path, sources: Path = SOURCES, others: Path | None = None
) -> tuple[Path, bool]:
    """The program, and whether it has the sanitizers.

    Args:
        folder: for what is compiled.
        sources: of the library.
        others: a folder in which all but ``archive.cpp`` was compiled before.

    Raises:
        RuntimeError: there is no compiler, or it refuses.
    """
    found = compiler()
    if found is None:
        raise RuntimeError("no C++ compiler is installed")
    refused = ""
    for sanitizers in (SANITIZERS, ()):
        try:
            objects: list[str] = []
            for source in (HARNESS, *(sources / f"{part}.cpp" for part in PARTS)):
                if others is not None and source.stem != "archive":
                    objects.append(str(others / f"{source.stem}.o"))
                    continue
                objects.append(str(folder / f"{source.stem}.o"))
                command = [found, "-std=c++17", "-O0", "-I", str(sources), *sanitizers]
                _run([*command, "-c", str(source), "-o", objects[-1]])
            program = folder / "archive_fuzz"
            _run([found, *sanitizers, *objects, "-o", str(program), "-pthread", "-ldl"])
        except RuntimeError as error:
            refused = str(error)
        else:
            return program, bool(sanitizers)
    raise RuntimeError(refused)


def archive_with_pointers() -> bytes:
    """One of all kinds that says what its first words are addresses of, with contents of some."""
    whole = archive_of_all_kinds()
    nodes = list(nodes_of(whole))
    words = [Word(node.place, number % 3, 8 * number) for number, node in enumerate(nodes)]
    allocations = (
        RecordedAllocation(0x6000_0000_1000, 4096),
        RecordedAllocation(0x6000_0000_2000, 4096, 1, 2, kind=1),
        RecordedAllocation(0x6000_0000_2000, 4096, 3, kind=2, contents=bytes(4096)),
    )
    return with_pointers(whole, PointerTable(allocations, (1, 2, 256), tuple(words)))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])


def fuzz(program: Path, folder: Path, seed: int, mutations: int) -> dict[str, int]:
    """What became of so many mutations.

    Args:
        program: the compiled one.
        folder: for what is mutated.
        seed: the same gives the same mutations.
        mutations: how many.

    Raises:
        RuntimeError: it crashed, or what was refused had reached the driver.
    """
    files: list[str] = []
    for number, whole in enumerate(
        (
            archive(),
            archive_of_all_kinds(),
            archive_with_pointers(),
            ImageMaker(["first", "second"]).image(),
        )
    ):
        file = folder / f"whole-{number}"
        file.write_bytes(whole)
        files.append(str(file))
    done = subprocess.run(
        [str(program), str(seed), str(mutations), *files],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"status {done.returncode}: {done.stderr[-4000:]}")
    return json.loads(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with TemporaryDirectory() as scratch:
        program, sanitized = compile_fuzzer(Path(scratch))
        counts = fuzz(program, Path(scratch), options.seed, options.mutations)
    print(json.dumps({"seed": options.seed, "sanitized": sanitized, **counts}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
