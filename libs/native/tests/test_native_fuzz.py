"""Broken archives and images: none crashes the parser, none that is refused reaches the driver."""

import shutil
from pathlib import Path

import pytest
from archive_fuzz import compile_fuzzer, fuzz

from pilotlight.native.building import SOURCES, compiler

MUTATIONS = 20_000


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the program."""
    if compiler() is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("fuzz")
    compile_fuzzer(folder)
    return folder


def test_no_mutation_crashes_or_reaches_the_driver_when_refused(compiled: Path) -> None:
    program = compiled / "archive_fuzz"
    counts = fuzz(program, compiled, seed=1, mutations=MUTATIONS)
    assert counts["refused"] + counts["taken"] == counts["mutations"] == MUTATIONS
    assert min(counts["refused"], counts["taken"]) > MUTATIONS / 10, "both ways are tried"
    assert counts["moved"] > MUTATIONS / 20, "addresses are written anew"
    assert counts["driver_calls"] > counts["taken"]
    first, again = (fuzz(program, compiled, seed=2, mutations=500) for _ in range(2))
    assert first == again, "a seed repeats itself"


def test_a_parser_that_forgets_a_bound_is_found(tmp_path: Path, compiled: Path) -> None:
    """Or the mutations prove nothing."""
    sources = tmp_path / "cpp"
    shutil.copytree(SOURCES, sources)
    checking = (sources / "archive.cpp").read_text()
    bound = "node.kernel >= header.num_kernels"
    assert checking.count(bound) == 1
    (sources / "archive.cpp").write_text(checking.replace(bound, "false"))
    program, sanitized = compile_fuzzer(tmp_path, sources, others=compiled)
    if not sanitized:
        pytest.skip("the compiler has no sanitizers")
    with pytest.raises(RuntimeError, match=r"AddressSanitizer|runtime error"):
        fuzz(program, tmp_path, seed=1, mutations=MUTATIONS)
