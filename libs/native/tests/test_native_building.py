"""Where the library comes from, and what is said where it cannot be had."""

import shutil
import stat
import subprocess
import sys

import pytest

from pilotlight.native import building
from pilotlight.native.building import CannotCompile, compile_library, library_name

ASK = (
    "import sys; sys.path[:0] = sys.argv[1].split(':')\n"
    "from pilotlight.native.library import unavailable\nprint(unavailable() or 'there')"
)


def test_the_name_follows_the_sources(tmp_path, monkeypatch):
    name = library_name()
    assert name == library_name()
    for folder, file in (("SOURCES", "arena.cpp"), ("BLAKE3", "blake3_avx2_x86-64_unix.S")):
        copied = tmp_path / folder
        shutil.copytree(getattr(building, folder), copied)
        monkeypatch.setattr(building, folder, copied)
        assert library_name() == name
        with (copied / file).open("a") as source:
            source.write("\n// changed\n")
        assert library_name() != name
        name = library_name()


def test_no_two_files_are_compiled_to_one(monkeypatch):
    for machine in ("x86_64", "aarch64", "riscv64"):
        monkeypatch.setattr(building.platform, "machine", lambda found=machine: found)
        names = [source.stem for source in building.sources()]
        assert len(set(names)) == len(names)
        assert all(source.is_file() for source in building.sources())


def test_without_a_compiler_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CannotCompile, match=r"no C\+\+ compiler.*apt-get install"):
        compile_library(tmp_path / "lib.so")
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_refuses_leaves_nothing(tmp_path, monkeypatch):
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\necho no such language >&2\nexit 3\n")
    broken.chmod(stat.S_IRWXU)
    monkeypatch.setenv("CXX", str(broken))
    target = tmp_path / "made" / "lib.so"
    with pytest.raises(CannotCompile, match="fails: no such language"):
        compile_library(target)
    assert not list(target.parent.iterdir())


def test_a_process_without_library_and_compiler_imports_and_says_why(tmp_path):
    source = building.SOURCES.parent
    package = tmp_path / "site" / "pilotlight" / "native"
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    environment = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-I", "-c", ASK, str(tmp_path / "site")]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert "pilotlight-native has no library: no C++ compiler" in done.stdout


def test_it_is_made_once_at_first_use(tmp_path, monkeypatch):
    """By a compiler that only notes what it was asked for."""
    noting = tmp_path / "noting-c++"
    noting.write_text(
        f'#!/bin/sh\necho "$*" >>{tmp_path}/asked\nwhile [ "$1" != -o ]; do shift; done\necho made >"$2"\n'
    )
    noting.chmod(stat.S_IRWXU)
    monkeypatch.setenv("CXX", str(noting))
    target = tmp_path / "cache" / library_name()
    compile_library(target)
    compile_library(target)
    assert target.read_text() == "made\n"
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == len(building.sources()) + 1
    assert "-shared" in asked[-1]
