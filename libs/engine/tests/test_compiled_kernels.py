"""Compiled kernels as an archive, and in a process's store: what is kept, what is refused, whose
files go.
"""

import base64
import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from graph_archives import ImageMaker
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.engine.cuda import kernel_store
from pilotlight.engine.cuda.compiled import MAX_ENTRIES, Entry, KernelsRefused, pack, unpack
from pilotlight.engine.cuda.kernel_store import FOLDER, KernelStore
from pilotlight.policy.materialized import CompiledFor

IMAGE = ImageMaker(["kernel"]).image()
FACTS = b'{"name": "kernel", "shared": 0, "num_warps": 4}'
LIBRARY = b"\x7fELF and so on"
MUTATIONS = 20_000


def key(name: str) -> str:
    """As triton makes them."""
    return base64.b32encode(hashlib.sha256(name.encode()).digest()).decode().rstrip("=")


def kernel(name: str, image: bytes = IMAGE, facts: bytes = FACTS) -> Entry:
    return Entry(key(name), {f"{name}.json": facts, f"{name}.cubin": image})


def library(name: str = "launcher.cpython-312-x86_64-linux-gnu") -> Entry:
    return Entry(key(name), {f"{name}.so": LIBRARY})


ENTRIES = (kernel("_gemv"), kernel("_add_norm"), library())


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelStore]:
    monkeypatch.setattr(kernel_store.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(kernel_store.tempfile, "tempdir", str(tmp_path))
    made = KernelStore()
    yield made
    made.close()


@given(st.permutations(ENTRIES))
def test_an_archive_is_the_same_for_the_same_kernels(entries: list[Entry]) -> None:
    data = pack(entries)
    assert data == pack(ENTRIES)
    assert {one.key: one.files for one in unpack(data)} == {one.key: one.files for one in ENTRIES}


def raw(*entries: object) -> bytes:
    return msgspec.msgpack.encode(entries)


WRONG: dict[str, bytes] = {
    "nothing": b"",
    "no archive": b"PLGRAPH1",
    "no entries": raw(),
    "too many": raw(*({"key": key(str(n)), "files": {}} for n in range(MAX_ENTRIES + 1))),
    "a key twice": raw(library(), library()),
    "more than an entry has": raw({"key": key("a"), "files": {}, "run": "me"}),
    "another key": raw(Entry("../../etc", library().files)),
    "a short key": raw(Entry(key("a")[:-1], library().files)),
    "a path": raw(Entry(key("a"), {"../a.so": LIBRARY})),
    "a hidden file": raw(Entry(key("a"), {".a.so": LIBRARY})),
    "no files": raw(Entry(key("a"), {})),
    "source": raw(Entry(key("a"), {"a.ptx": b"ptx"})),
    "a group": raw(Entry(key("a"), {"__grp__a.json": b"{}"})),
    "facts alone": raw(Entry(key("a"), {"a.json": FACTS})),
    "an image alone": raw(Entry(key("a"), {"a.cubin": IMAGE})),
    "two names": raw(Entry(key("a"), {"a.json": FACTS, "b.cubin": IMAGE})),
    "two images": raw(Entry(key("a"), {"a.json": FACTS, "a.cubin": IMAGE, "b.cubin": IMAGE})),
    "both": raw(Entry(key("a"), {"a.json": FACTS, "a.cubin": IMAGE, "a.so": LIBRARY})),
    "facts of nothing": raw(kernel("a", facts=b"[]")),
    "facts cut off": raw(kernel("a", facts=FACTS[:-1])),
    "no image": raw(kernel("a", image=b"PTX")),
    "an image cut off": raw(kernel("a", image=IMAGE[: len(IMAGE) // 2])),
    "no library": raw(Entry(key("a"), {"a.so": b"#!/bin/sh"})),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_triton_does_not_make_is_refused_by_name(store: KernelStore, name: str) -> None:
    with pytest.raises(KernelsRefused) as refused:
        store.restore(WRONG[name])
    assert refused.value.field == "compile_cache"
    assert store.restored == 0


def test_no_mutation_of_an_archive_does_more_than_be_refused(
    store: KernelStore, tmp_path: Path
) -> None:
    """Whatever is taken lies in the folder, under a name of triton's."""
    data, rng = pack(ENTRIES[1:]), random.Random(86)
    taken = refused = 0
    for _ in range(MUTATIONS):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            # Heads are few among the bytes of images.
            at = rng.randrange(len(changed) if rng.random() < 0.5 else 200)
            match rng.randrange(3):
                case 0:
                    changed[at] = rng.randrange(256)
                case 1:
                    del changed[at : at + rng.randint(1, 8)]
                case _:
                    changed[at:at] = rng.randbytes(rng.randint(1, 8))
        try:
            entries = unpack(bytes(changed))
        except KernelsRefused:
            refused += 1
            continue
        taken += 1
        for entry in entries:
            assert len(entry.key) == 52
            assert not any("/" in name or name.startswith(".") for name in entry.files)
    assert min(taken, refused) > MUTATIONS / 100, (taken, refused)


def test_restored_kernels_are_found_by_triton_s_names(store: KernelStore) -> None:
    assert store.restore(pack(ENTRIES)) == 3
    files = store.kernel(key("_gemv"), "_gemv.json")
    assert files is not None
    assert files.keys() == {"_gemv.json", "_gemv.cubin"}
    assert Path(files["_gemv.cubin"]).read_bytes() == IMAGE
    assert Path(files["_gemv.json"]).read_bytes() == FACTS
    (name,) = library().files
    found = store.file(library().key, name)
    assert found is not None
    assert Path(found).read_bytes() == LIBRARY
    assert store.kernel(key("_gemv"), "_add_norm.json") is None
    assert store.kernel(key("_other"), "_gemv.json") is None
    assert store.file(key("_other"), name) is None


def test_what_was_used_is_written_down_without_what_only_a_compiler_needs(
    store: KernelStore, tmp_path: Path
) -> None:
    group = {f"_gemv.{end}": str(tmp_path / f"_gemv.{end}") for end in ("json", "cubin", "ptx")}
    for path in group.values():
        Path(path).write_bytes(FACTS if path.endswith("json") else IMAGE)
    store.use(key("_gemv"), group)
    assert store.noted() == (), "nothing is remembered unless it is asked for"
    store.noting = True
    store.use(key("_gemv"), group)
    store.use(key("_gemv"), group)
    (entry,) = store.noted()
    assert entry == kernel("_gemv")
    Path(group["_gemv.cubin"]).unlink()
    with pytest.raises(KernelsRefused) as refused:
        store.noted()
    assert refused.value.field == "files"


def test_what_is_compiled_is_counted_from_the_restore_on(store: KernelStore) -> None:
    for name in ("_gemv.ttir", "_gemv.cubin", "launcher.so", "_gemv.json"):
        store.make(key("_gemv"), name)
    assert store.compiled == ("_gemv.cubin", "launcher.so")
    store.restore(pack(ENTRIES))
    assert store.compiled == ()


def test_kernels_that_do_not_work_are_given_up_once(store: KernelStore) -> None:
    assert not store.give_up("there is nothing to give up")
    assert store.broken == ""
    store.restore(pack(ENTRIES))
    assert store.give_up("no such kernel in the image")
    assert store.kernel(key("_gemv"), "_gemv.json") is None
    assert store.broken == "no such kernel in the image"
    assert not store.give_up("again")
    store.restore(pack(ENTRIES))
    assert store.broken == "", "another artifact's may work"


def test_files_go_with_the_store_and_with_processes_that_were_killed(
    store: KernelStore, tmp_path: Path
) -> None:
    killed = tmp_path / f"{FOLDER}killed"
    killed.mkdir()
    (killed / "file").write_bytes(b"x")
    program = (
        "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from pilotlight.engine.cuda.kernel_store import STORE\n"
        "STORE._opened(); print('there', flush=True); sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "there\n"
    (theirs,) = set(tmp_path.glob(f"{FOLDER}*")) - {killed}
    assert not killed.exists(), "no process holds it"
    store.restore(pack(ENTRIES))
    (ours,) = set(tmp_path.glob(f"{FOLDER}*")) - {theirs}
    assert theirs.exists(), "another process has it"
    other.kill()
    other.communicate()
    store.close()
    assert not ours.exists()
    store.restore(pack(ENTRIES))
    assert not theirs.exists()


def test_a_folder_that_another_process_sweeps_is_made_again(
    store: KernelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, locked, descriptors = [], kernel_store._locked, len(os.listdir("/proc/self/fd"))

    def swept(folder: Path) -> int:
        made.append(folder)
        if len(made) == 1:
            folder.rmdir()
            raise FileNotFoundError(folder)
        descriptor = locked(folder)
        if len(made) == 2:
            folder.rmdir()
        return descriptor

    monkeypatch.setattr(kernel_store, "_locked", swept)
    assert store.restore(pack(ENTRIES)) == 3
    assert (len(made), made[2].exists()) == (3, True)
    store.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors, "none is left open"


def test_where_there_is_no_room_for_files_nothing_is_restored(
    store: KernelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, entry: Entry) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kernel_store, "_written", full)
    with pytest.raises(KernelsRefused, match="No space left") as refused:
        store.restore(pack(ENTRIES))
    assert refused.value.field == "files"
    assert store.kernel(key("_gemv"), "_gemv.json") is None


HERE = CompiledFor(compiler="triton 3.6.0", processor="sm_90", python=".so", libc="glibc 2.39")


@settings(max_examples=20)
@given(st.sampled_from(["compiler", "processor", "python", "libc"]))
def test_the_first_field_that_differs_is_named(field: str) -> None:
    assert HERE.differs(HERE) is None
    assert HERE.differs(replace(HERE, **{field: "other"})) == field
