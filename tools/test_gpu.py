"""Tests on a machine with a GPU, which may have no package index: ``make test-gpu``, or ``python3
tools/test_gpu.py``.

Uses an environment that is there, or installs one from the offline archive (``--bundle FOLDER``; by
default one below ``dist``), and runs what tests there are. Prints one JSON line for each check
({"check", "ok", "seconds", "detail"}), as the last line PASS or FAIL, and ends with that status. A
check that cannot run has failed: nothing is skipped. Each step has a deadline, and so has the
whole. Needs the standard library alone; tests are added as files in ``tests/gpu``.

In this order, each step within its deadline and all within 540 seconds: the driver; an environment;
torch; the tests on the device, side by side (each compiles kernels, which is most of their time),
then those that measure its memory or speed, alone; the whole system with a GPU worker, twice, since
the first cold chat compiles what the second finds; the engine's own tests on this torch; the
benchmark of the engine, one round without another engine beside it (``make bench-engine-gpu`` has
more).
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bounded_runs import ROOT, TAIL, CheckFailed, finish, pytest, tail, with_sources

TOTAL_S = 540.0
"""Of everything: with the grace of whatever is stopped, it is to end within 10 minutes."""
INSTALL_S, PROBE_S, TORCH_S = 210.0, 60.0, 90.0
DEVICE_TESTS_S, ALONE_S, CHAT_S, ENGINE_TESTS_S = 170.0, 100.0, 110.0, 120.0
BENCH_S = 260.0
BENCH_STOP_S = 30.0
"""Of that, to end in order and say what was measured; it ends engines with tens of GiB each."""
ALONE = (
    "test_gpu_arena.py",
    "test_gpu_arena_pools.py",
    "test_gpu_leaks.py",
    "test_gpu_lending.py",
    "test_gpu_stream.py",
)
"""They count the device's free memory, or time the bus: nothing may run beside them."""
SIDE_BY_SIDE = 9
"""Processes of tests at most; a context on the device takes half a gigabyte."""
NEEDED = ("pilotlight.cli.main", "pytest", "anyio", "hypothesis", "safetensors", "transformers")
TORCH_CODE = """
import json, sys, torch, numpy
cuda = torch.cuda.is_available()
print(json.dumps({"torch": torch.__version__, "numpy": numpy.__version__, "cuda_build": torch.version.cuda, "cuda_available": cuda,
    "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []}))
"""
SHAPES = ("4B", "8B")
"""Of ``bench/engine_gpu_job.py``."""


def now_s() -> float:
    """A clock that only goes forward."""
    return time.monotonic()  # noqa: TID251 - this runs before Pilotlight and its Clock are installed


@dataclass
class Report:
    """Prints a line for each check, and remembers whether all were well."""

    began_s: float = field(default_factory=now_s)
    all_ok: bool = True

    def left_s(self, deadline_s: float) -> float:
        """What a step that may take ``deadline_s`` may take now."""
        return min(deadline_s, self.began_s + TOTAL_S - now_s())

    def line(self, check: str, *, ok: bool, seconds: float, detail: Any) -> None:
        """Print one."""
        self.all_ok = self.all_ok and ok
        print(
            json.dumps({"check": check, "ok": ok, "seconds": round(seconds, 3), "detail": detail}),
            flush=True,
        )

    def step(self, check: str, deadline_s: float, work: Callable[[float], tuple[Any, Any]]) -> Any:
        """Do a step, which is given its deadline and returns a result and a detail; None when it
        failed.
        """
        began_s = now_s()
        try:
            if self.left_s(deadline_s) <= 0:
                raise CheckFailed(f"not run: the {TOTAL_S:g} s of the whole are used up")
            result, detail = work(self.left_s(deadline_s))
        except (CheckFailed, OSError) as error:
            self.line(check, ok=False, seconds=now_s() - began_s, detail=str(error))
            return None
        except (ValueError, LookupError) as error:
            self.line(
                check,
                ok=False,
                seconds=now_s() - began_s,
                detail=f"what it printed was not understood: {error!r}",
            )
            return None
        self.line(check, ok=True, seconds=now_s() - began_s, detail=detail)
        return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every check; the process's exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bundle",
        type=Path,
        help="folder that `make bundle` made; installed from even when there is an environment",
    )
    parser.add_argument(
        "--prefix", type=Path, default=ROOT / "dist" / "test-gpu", help="where it is installed"
    )
    asked = parser.parse_args(arguments)
    report = Report()
    report.step("driver", PROBE_S, driver)
    python = report.step(
        "environment", INSTALL_S, lambda left_s: environment(asked.bundle, asked.prefix, left_s)
    )
    later: dict[str, Callable[[], object]] = {
        "torch": lambda: report.step("torch", TORCH_S, lambda left_s: torch_of(python, left_s)),
        "device": lambda: device_tests(report, python),
        "chat": lambda: report.step("chat", CHAT_S, lambda left_s: chat(python, left_s)),
        "chat again": lambda: report.step(
            "chat again", CHAT_S, lambda left_s: chat(python, left_s)
        ),
        "engine": lambda: report.step(
            "engine", ENGINE_TESTS_S, lambda left_s: engine_tests(python, left_s)
        ),
        "bench": lambda: report.step("bench", BENCH_S, lambda left_s: bench(python, left_s)),
    }
    for name, check in later.items():
        if python is None:
            report.line(name, ok=False, seconds=0.0, detail="not run: there is no environment")
        else:
            check()
    print("PASS" if report.all_ok else "FAIL", flush=True)
    return 0 if report.all_ok else 1


def driver(left_s: float) -> tuple[Any, Any]:
    """What nvidia-smi says."""
    if shutil.which("nvidia-smi") is None:
        raise CheckFailed(
            "no GPU: there is no nvidia-smi. Install NVIDIA's driver, or give the container its devices (--gpus all)"
        )
    fields = ("name", "memory.total", "driver_version")
    told = finish(
        ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"], left_s
    )
    if told.returncode != 0 or not told.stdout.strip():
        raise CheckFailed(f"no GPU: nvidia-smi says {tail(told)}")
    devices = [
        dict(zip(fields, (word.strip() for word in line.split(",")), strict=False))
        for line in told.stdout.strip().splitlines()
    ]
    return devices, devices


def environment(bundle: Path | None, prefix: Path, left_s: float) -> tuple[Any, Any]:
    """A Python that has what the tests need: one that is there, or one installed from the
    archive.
    """
    looked_at: list[str] = []
    end_s = now_s() + left_s
    if bundle is None:
        folder = Path(os.environ.get("VENV") or ROOT / ".venv")
        for candidate in dict.fromkeys([str(folder.absolute() / "bin" / "python"), sys.executable]):
            missing = missing_in(candidate, end_s - now_s())
            if not missing:
                return candidate, {
                    "python": candidate,
                    "version": version_of(candidate, end_s - now_s()),
                    "installed_from": None,
                }
            looked_at.append(f"{candidate} {missing}")
        bundle = newest_bundle()
    if bundle is None:
        own = "{}.{}".format(*sys.version_info)
        raise CheckFailed(
            f"nothing to test with: {'; '.join(looked_at)}; and no archive for Python {own} lies in {ROOT / 'dist'}. "
            f"On a machine with a package index: make bundle PYTHON={own}; copy its folder here, and name it: make test-gpu BUNDLE=FOLDER"
        )
    if not (bundle / "install.sh").is_file():
        raise CheckFailed(
            f"{bundle} is no folder that `make bundle` made: there is no install.sh in it"
        )
    plain = {**os.environ, "PYTHON": os.environ.get("PYTHON") or sys.executable}
    done = finish(
        ["sh", str(bundle / "install.sh"), str(prefix), "--with-tests"], end_s - now_s(), plain
    )
    print(done.stdout + done.stderr, file=sys.stderr, flush=True)
    if done.returncode != 0:
        raise CheckFailed(tail(done))
    python = str(prefix.absolute() / "current" / "bin" / "python")
    if missing := missing_in(python, end_s - now_s()):
        raise CheckFailed(f"installed, but {python} {missing}")
    return python, {
        "python": python,
        "version": version_of(python, end_s - now_s()),
        "installed_from": str(bundle),
    }


def newest_bundle() -> Path | None:
    """The archive for this Python that was made last."""
    found = ROOT.glob("dist/pilotlight-*-py{}{}-linux-x86_64/install.sh".format(*sys.version_info))
    return max((path.parent for path in found), key=lambda path: path.stat().st_mtime, default=None)


def missing_in(python: str, left_s: float) -> str:
    """What keeps a Python from running the tests; empty when nothing does. torch has a check of its
    own.
    """
    if not Path(python).is_file():
        return "is not there"
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    told = finish([python, "-c", code, *NEEDED], min(PROBE_S, left_s), with_sources(os.environ))
    return (
        ""
        if told.returncode == 0
        else f"lacks something: {told.stderr.strip().splitlines()[-1:] or ['?']}"
    )


def version_of(python: str, left_s: float) -> str:
    """Its version."""
    return finish(
        [python, "-c", "import platform; print(platform.python_version())"], min(PROBE_S, left_s)
    ).stdout.strip()


def torch_of(python: str, left_s: float) -> tuple[Any, Any]:
    """Is there a torch, and does it see a device?"""
    told = finish([python, "-c", TORCH_CODE], left_s)
    if told.returncode != 0:
        raise CheckFailed(
            f"torch and numpy cannot be imported by {python}; install.sh says above what it looked for: {tail(told)}"
        )
    found = json.loads(told.stdout.strip().splitlines()[-1])
    if not found["cuda_available"]:
        build = f"for CUDA {found['cuda_build']}" if found["cuda_build"] else "without CUDA"
        raise CheckFailed(f"torch {found['torch']}, built {build}, sees no device")
    return found, found


def device_tests(report: Report, python: str) -> None:
    """Every test of ``tests/gpu``, each a check of its own."""
    files = sorted(path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    together = [f"tests/gpu/{name}" for name in files if name not in ALONE]
    alone = [f"tests/gpu/{name}" for name in files if name in ALONE]
    parallel = side_by_side(python, SIDE_BY_SIDE)
    for name, chosen, options, deadline_s in (
        ("device", together, parallel, DEVICE_TESTS_S),
        ("alone", alone, (), ALONE_S),
    ):
        began_s = now_s()
        cases, done = pytest(python, [*chosen, "-m", "gpu", *options], report.left_s(deadline_s))
        for case in cases:
            report.line(
                f"{name}: {case.name}",
                ok=case.outcome == "passed",
                seconds=case.seconds,
                detail=case.detail,
            )
        if (
            not cases
            or done is None
            or (done.returncode != 0 and all(case.outcome == "passed" for case in cases))
        ):
            why = (
                f"not done after {deadline_s:g} s, or no time was left"
                if done is None
                else tail(done)
            )
            report.line(name, ok=False, seconds=now_s() - began_s, detail=why)


def side_by_side(python: str, count: int, dist: str = "load") -> tuple[str, ...]:
    """Options with which pytest runs several tests at once, each on a processor; nothing where
    pytest-xdist is not there.
    """
    count = min(count, os.cpu_count() or 1)
    there = count > 1 and finish([python, "-c", "import xdist"], PROBE_S).returncode == 0
    return ("-p", "xdist", "-n", str(count), "--dist", dist) if there else ()


def engine_tests(python: str, left_s: float) -> tuple[Any, Any]:
    """The engine's own tests, on this machine's torch."""
    options = side_by_side(python, SIDE_BY_SIDE, "loadfile")
    cases, done = pytest(python, ["libs/engine/tests", *options], left_s)
    if done is None:
        raise CheckFailed(f"not done after {left_s:.0f} s")
    outcomes = {
        word: sum(1 for case in cases if case.outcome == word)
        for word in ("passed", "failed", "skipped")
    }
    if done.returncode != 0 or outcomes["passed"] == 0:
        bad = [f"{case.name}: {case.detail}" for case in cases if case.outcome == "failed"][:3]
        raise CheckFailed(f"{outcomes} {' | '.join(bad) or tail(done)}")
    return outcomes, outcomes


def bench(python: str, left_s: float) -> tuple[Any, Any]:
    """Our engine's figures on this device, by shape and row."""
    limit_s = (left_s - BENCH_STOP_S) / len(SHAPES)
    command = [
        python,
        str(ROOT / "bench" / "engine_gpu.py"),
        "--rounds",
        "1",
        "--limit-s",
        f"{limit_s:.0f}",
        "--shapes",
        *SHAPES,
    ]
    done = finish(command, left_s, with_sources(os.environ))
    print(done.stdout + done.stderr, file=sys.stderr, flush=True)
    if done.returncode != 0:
        raise CheckFailed(tail(done))
    rows = [line for line in map(json.loads, done.stdout.splitlines()) if "row" in line]
    found = {
        shape: {
            line["row"]: f"{line['ours']} {line['unit']}" for line in rows if line["shape"] == shape
        }
        for shape in SHAPES
    }
    if empty := [shape for shape, figures in found.items() if not figures]:
        raise CheckFailed(f"no figure of {', '.join(empty)}")
    return found, found


def chat(python: str, left_s: float) -> tuple[Any, Any]:
    """The whole system with a worker on the GPU: a cold chat and a warm one, and where the time of
    the cold one went.
    """
    with tempfile.TemporaryDirectory(prefix="pilotlight-") as folder:
        os.chmod(folder, 0o711)  # PostgreSQL, which does not run as root, has to pass it
        variables = {
            **with_sources(os.environ),
            "PILOTLIGHT_HOME": str(Path(folder) / "home"),
            "PILOTLIGHT_WORKER_KIND": "cuda",
            "COLUMNS": "120",
        }
        code = "import sys; from pilotlight.cli.main import main; sys.exit(main())"
        done = finish([python, "-c", code, "demo"], left_s, variables)
        print(done.stdout, file=sys.stderr, flush=True)
        if done.returncode != 0:
            raise CheckFailed(f"{tail(done)} {logs_of(Path(folder))}")
    result = json.loads(done.stdout.strip().splitlines()[-1].removeprefix("RESULT "))
    if [device["kind"] for device in result["devices"]] != ["cuda"]:
        raise CheckFailed(f"the worker ran on {result['devices']}")
    if result["output_tokens"] < 5:
        raise CheckFailed(f"an answer of {result['output_tokens']} tokens")
    return result, result


def logs_of(folder: Path) -> str:
    """The ends of what loader, worker and engine wrote."""
    found = sorted(
        path
        for name in ("loader", "worker", "engine")
        for path in folder.glob(f"**/logs/{name}*.log")
    )
    return " ".join(f"{path.name}: {path.read_text(errors='replace')[-TAIL:]}" for path in found)


if __name__ == "__main__":
    sys.exit(main())
