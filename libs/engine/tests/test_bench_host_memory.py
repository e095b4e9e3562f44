"""``make bench-host-memory-gpu`` over a fake driver: every kind is measured or says why not, what
fails leaves the others alone, and what another process writes is seen.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import MIB, fake_cuda

BENCH = Path(__file__).resolve().parents[3] / "bench"
SLABS = {"slabs of 64 MiB", "slabs of 16 MiB"}
MOUNTS = """\
overlay / overlay rw,relatime 0 0
tmpfs /dev tmpfs rw,nosuid 0 0
shm /dev/shm tmpfs rw,size=64g,huge=advise 0 0
tmpfs /dev/shm/inner tmpfs ro 0 0
"""
SMAPS = """\
7f0000000000-7f0000400000 rw-s 00000000 00:01 5    /memfd:host-memory (deleted)
Size:               4096 kB
KernelPageSize:        4 kB
ShmemPmdMapped:     2048 kB
AnonHugePages:         0 kB
VmFlags: rd wr sh mr mw me ms sd
7f0000400000-7f0000600000 rw-s 00400000 00:01 5    /memfd:host-memory (deleted)
ShmemPmdMapped:     2048 kB
7f0000600000-7f0000a00000 rw-p 00000000 00:00 0
AnonHugePages:      4096 kB
"""


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def rows(capsys: pytest.CaptureFixture[str], folder: Path, *more: str) -> dict[str, Any]:
    """What it prints for 64 MiB, by what it is of."""
    import host_memory_gpu

    given = ["--gib", "0.0625", "--rounds", "1", "--folder", str(folder), "--seconds", "60"]
    given += ["--driver", fake_cuda().path, "--commit", "abcdef0 2026-01-02", *more]
    host_memory_gpu.main(given)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len({row["what"] for row in found}) == len(found)
    assert {(row["commit"], row["commit_date"]) for row in found} == {("abcdef0", "2026-01-02")}
    return {row["what"]: row for row in found}


@pytest.mark.slow
def test_what_is_registered_is_measured_in_both_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = rows(capsys, tmp_path, "--kinds", "memfd-huge", "pageable")
    assert [row for row in found.values() if "failed" in row] == []
    memory = found["memfd-huge: memory"]
    assert {"asked_for_huge", "collapse", "huge_kib", "mount"} <= memory.keys()
    for size in SLABS:
        registered = found[f"memfd-huge: registration, {size}"]
        assert all(len(values) == 1 for values in registered["samples"].values())
        assert registered["medians"]["attach_s_per_gib"] > 0
        for where in ("a thread", "another process"):
            beside = found[f"memfd-huge: launches beside registration in {where}, {size}"]
            assert {f"{name}_longest_ms" for name in ("alone", "attach", "detach")} <= {
                *beside["medians"]
            }
            assert beside["launched_by"].startswith("memset"), "the fake compiles nothing"
    for what in ("memfd-huge: copies", "pageable: copies through the ring"):
        assert found[what]["medians"]["gb_per_s"] > 0
    assert (
        "copy_longest_ms" in found["pageable: launches beside copies through the ring"]["medians"]
    )


@pytest.mark.slow
def test_what_the_driver_makes_is_shared_with_other_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = rows(capsys, tmp_path, "--kinds", "driver")
    assert [row for row in found.values() if "failed" in row] == []
    assert found["driver: memory"]["granule_bytes"] == 2 * MIB
    for context in ("with", "without"):
        written = found[f"driver: a second process {context} a context writes"]
        assert written["seen"], "through this process' own mapping"
        assert (written["spent_s"]["device_access"] > 0) == (context == "with")
    assert found["driver: a second process maps the descriptor by mmap"]["mmap"] == "worked"
    made = found["driver: a second process without a context makes"]
    assert made["medians"]["create_ms"] > 0


def test_a_kind_that_fails_says_so_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import host_memory_gpu

    broken = tmp_path / "job.py"
    broken.write_text(
        "import os, sys\n"
        "if sys.argv[1] == 'tmpfs':\n    os.abort()\n"
        'print(\'{"what": "pageable: memory"}\')\n'
    )
    monkeypatch.setattr(host_memory_gpu, "JOB", broken)
    found = rows(capsys, tmp_path, "--kinds", "tmpfs", "pageable")
    assert [*found] == ["tmpfs: its process", "pageable: memory"]
    assert found["tmpfs: its process"]["failed"].startswith("exit status -6")


def test_a_step_that_fails_or_comes_too_late_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import host_memory_job
    from host_memory_driver import Refused

    class Steps:
        kind = "driver"

        def steps(self) -> Any:
            def refused() -> None:
                raise Refused("cuMemCreate gives 801")

            yield "memory", refused
            yield "copies", lambda: {"medians": {}}

    bench: Any = Steps()
    for seconds in (60.0, -1.0):
        host_memory_job.run(bench, seconds)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert told == [
        {"what": "driver: memory", "failed": "Refused: cuMemCreate gives 801"},
        {"what": "driver: copies", "medians": {}},
        {"what": "driver: memory", "left_out": "-1 s are over"},
        {"what": "driver: copies", "left_out": "-1 s are over"},
    ]


def test_a_folder_without_room_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, tmp_path, "--kinds", "tmpfs", "--gib", str(1 << 30))
    (row,) = found.values()
    assert f"{tmp_path} has" in row["failed"]


def test_what_the_system_says_is_read() -> None:
    from host_memory_gpu import bytes_of
    from host_memory_kinds import huge_kib, mount_of

    start = 0x7F0000000000
    assert huge_kib(SMAPS, start, start + 6 * MIB) == {"ShmemPmdMapped": 4096}
    assert huge_kib(SMAPS, start, start + 4 * MIB) == {"ShmemPmdMapped": 2048}
    assert mount_of(MOUNTS, "/dev/shm") == "tmpfs rw,size=64g,huge=advise"
    assert mount_of(MOUNTS, "/dev/shmother") == "tmpfs rw,nosuid"
    assert mount_of(MOUNTS, "/home") == "overlay rw,relatime"
    assert [bytes_of(gib) // MIB for gib in (4, 0.3, 0.0625, 0)] == [4096, 256, 64, 2]
