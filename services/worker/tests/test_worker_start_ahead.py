"""What an engine's process begins before it imports anything, and what one keeps for the next."""

import sys
from pathlib import Path

import pytest

from pilotlight.native.library import library
from pilotlight.native.plan import PLAN, TRYING, NativePlan
from pilotlight.policy.cluster import DeviceKind
from pilotlight.worker import engine_main
from pilotlight.worker.engines.child_command import ChildOptions, start_folder


def plan(**fields: object) -> NativePlan:
    facts: dict[str, object] = {
        "layout": "1",
        "library": str(library().path),
        "driver": "/nowhere/libcuda.so.1",
        "address": 1 << 40,
        "num_bytes": 1 << 21,
        "ranges": (),
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


def test_a_spare_begins_nothing(folder: Path) -> None:
    written(folder, plan().as_json())
    assert engine_main.begun(["--start", str(folder), "--spare"]) is None
    assert (folder / PLAN).exists(), "it is for the next engine"


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
