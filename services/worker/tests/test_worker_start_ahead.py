"""What an engine's process begins before it imports anything, and what one keeps for the next."""

import os
import sys
from pathlib import Path

import pytest

from pilotlight.native.library import library
from pilotlight.native.plan import PLAN, TRYING, NativePlan
from pilotlight.policy.cluster import DeviceKind
from pilotlight.worker import engine_main
from pilotlight.worker.engine_child.host_pool import HostPool
from pilotlight.worker.engine_child.pins import Pins
from pilotlight.worker.engines.child_command import ChildOptions, start_folder


def plan(**fields: object) -> NativePlan:
    facts: dict[str, object] = {
        "layout": "1",
        "library": str(library().path),
        "driver": "/nowhere/libcuda.so.1",
        "address": 1 << 40,
        "num_bytes": 1 << 21,
        "ranges": (),
        "chunk_bytes": 1 << 21,
        **fields,
    }
    return NativePlan(**facts)  # pyright: ignore[reportArgumentType]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(engine_main, "gpus_shown", lambda shown: 1 if shown == "0" else 2)
    made = tmp_path / "starts"
    made.mkdir(mode=0o700)
    return made


def written(folder: Path, data: bytes) -> None:
    (folder / PLAN).write_bytes(data)
    (folder / PLAN).chmod(0o600)


def test_a_planned_start_is_begun_once(folder: Path) -> None:
    written(folder, plan().as_json())
    begun = engine_main.begun(["--fd", "3", "--start", str(folder)])
    assert begun is not None
    assert begun.plan == plan()
    begun.end()
    assert (folder / TRYING).exists()
    assert engine_main.begun(["--start", str(folder)]) is None, "the first one is not up yet"


def test_nothing_is_begun_without_a_plan(folder: Path) -> None:
    assert engine_main.begun(["--fd", "3"]) is None
    assert engine_main.begun(["--fd", "3", "--start"]) is None
    assert engine_main.begun(["--start", str(folder)]) is None
    assert engine_main.begun(["--start", str(folder / "none")]) is None


def test_nothing_is_begun_where_the_gpu_is_not_known(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(folder, plan().as_json())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert engine_main.begun(["--start", str(folder)]) is None
    assert (folder / PLAN).exists(), "it is for the next one"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"nonsense", "no plan"),
        (plan(library="/nowhere/lib.so").as_json(), "/nowhere/lib.so"),
    ],
)
def test_what_cannot_be_begun_is_said_and_not_tried_again(
    folder: Path, capsys: pytest.CaptureFixture[str], data: bytes, said: str
) -> None:
    written(folder, data)
    assert engine_main.begun(["--start", str(folder)]) is None
    assert said in capsys.readouterr().err
    assert engine_main.begun(["--start", str(folder)]) is None
    assert not capsys.readouterr().err


def test_little_is_imported_before_a_start_begins() -> None:
    import subprocess

    code = "import sys; from pilotlight.worker import engine_main; print(*sys.modules)"
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert not {"structlog", "msgspec", "torch", "asyncio", "numpy"} & {*told.stdout.split()}
    assert len(told.stdout.split()) < 110


def test_builds_and_cores_begin_nothing(tmp_path: Path) -> None:
    from contextlib import ExitStack

    from pilotlight.worker.engines.child_command import prepared

    def command(**fields: object) -> list[str]:
        options = ChildOptions(
            threads=1,
            log_path=tmp_path / "log",
            start=start_folder(tmp_path, "w0"),
            **fields,  # pyright: ignore[reportArgumentType]
        )
        with ExitStack() as stack:
            _, _, words, _ = prepared(options, (), stack, stack)
            return words

    assert "--start" not in command()
    cuda = {"device": DeviceKind.CUDA}
    assert command(**cuda)[-2:] == ["--start", str(tmp_path / "starts" / "w0")]
    for build in ("record_images", "note_kernels", "witness"):
        assert "--start" not in command(**cuda, **{build: True})
    assert start_folder(None, "w0") is None


class Slabs:
    def __init__(self) -> None:
        self.adopted: tuple[int, ...] = ()
        self.asked: list[int] = []

    def adopt(self, pinned: object) -> None:
        self.adopted = tuple(pinned)  # pyright: ignore[reportArgumentType]

    def pin_next(self, wanted: object = ()) -> bool:
        self.asked += list(wanted)  # pyright: ignore[reportArgumentType]
        return True

    def close(self) -> None: ...


def test_a_pool_that_is_mapped_already_is_read_there(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    path.write_bytes(b"x" * 400)
    there = memoryview(b"y" * 400)
    slabs, asked = Slabs(), list[tuple[int, int, int]]()

    def begun(identity: tuple[int, int, int]) -> tuple[memoryview, tuple[int, ...]] | None:
        asked.append(identity)
        return (there, (0, 2)) if len(asked) == 1 else None

    pins = Pins(lambda pool, slab_bytes: slabs, slab_bytes=100, begun=begun)
    pool = HostPool(pins)
    assert pool.mapped(str(path)) is there
    status = path.stat()
    assert asked == [(status.st_dev, status.st_ino, 400)]
    assert slabs.adopted == (0, 2)
    pins.want(0, 300)
    while pins.waiting:
        pins.pin_one()
    assert slabs.asked == [100], "the others are pinned already"
    assert pool.mapped(str(path)) is there, "it is the same file"
    assert len(asked) == 1

    other = tmp_path / "other"
    other.write_bytes(b"z" * 400)
    os.replace(other, path)
    assert bytes(pool.mapped(str(path))) == b"z" * 400
    assert len(asked) == 2
