"""Starts that nodes share, behind links that ``tc`` shapes: ``make bench-groups``. Needs root.

Nodes in network namespaces, a store and the services in two more, whose links are as fast as the
machine. Three parts:

- ``stages``: the first token of a model of 411 MB by one, two and four stages, and by what the
  scheduler chooses for an SLO of twelve seconds (ParaServe, Fig. 8);
- ``ladder``: the same start with nothing beside anything else, and with one technique more after
  the other (Fig. 9);
- ``bursts``: average first token and time per token of bursts of requests by the size of groups,
  on workers that simulate (Fig. 14).

Writes ``--out`` as ``bench/results`` has it; what is measured anew takes the place of what was
there. The machine is to have nothing else to do: each figure says how busy its cores were.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"
sys.path[:0] = [str(BENCH), str(BENCH / "dataplane"), str(BENCH / "validation")]

import group_bursts  # noqa: E402
import group_starts  # noqa: E402
from cold_start import machine  # noqa: E402
from group_starts import Start  # noqa: E402
from netns import PREFIX, address, network  # noqa: E402
from netns import Host as Namespace  # noqa: E402

from pilotlight.common.clock import SystemClock  # noqa: E402

SHARED_MEMORY = Path("/dev/shm")
RATE = "200mbit"
BURST_RATE = "50mbit"
"""So that sixteen of them together are no more than four of the others."""
NODES, BURST_NODES = 4, 16
STAGES = (1, 2, 4)
BURSTS = (16, 128)
PARTS = ("stages", "ladder", "bursts")
COMMAND_S = 30.0


def said(asked: argparse.Namespace) -> dict[str, str]:
    """What ``bench/results`` says of each measurement: on what, when, from which commit."""
    shown = subprocess.run(
        ["git", "show", "-s", "--format=%H %cs"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=COMMAND_S,
        check=True,
    )
    commit, commit_date = shown.stdout.split()
    found = machine()
    more = [f"--bursts {' '.join(map(str, asked.bursts))}"] if "bursts" in asked.parts else []
    more += [f"--set {' '.join(asked.set)}"] if asked.set else []
    arguments = f" ARGS='{' '.join(more)}'" if more else ""
    return {
        "command": f"make bench-groups PARTS={asked.parts} ROUNDS={asked.rounds}{arguments}",
        "machine": f"{found['cores']} cores ({found['cpu']}), {found['memory_gib']} GiB, "
        f"Linux {found['kernel']}, Python {found['python']}",
        "commit": commit[:7],
        "commit_date": commit_date,
        "date": SystemClock().wall().date().isoformat(),
    }


@dataclass(frozen=True, slots=True)
class Asked:
    """Starts that are to be measured."""

    what: str
    slo: Mapping[str, float]
    stages: int | None = None
    """That count; None: as many as the scheduler chooses."""


class Bench:
    """Runs parts, and keeps what they gave after each measurement."""

    def __init__(self, asked: argparse.Namespace) -> None:
        """Nothing is measured yet."""
        self._asked = asked
        self._more = dict(one.split("=", 1) for one in asked.set)
        self._common = said(asked)
        self._measured: dict[
            tuple[tuple[tuple[str, str], ...], float], tuple[str, list[Start]]
        ] = {}
        """Starts by settings and SLO, and what they were measured as."""

    def _hosts(self, nodes: int) -> list[Namespace]:
        return [Namespace(f"{self._asked.inside}-{at}", address(at)) for at in range(2 + nodes)]

    def _keep(self, what: str, figures: dict[str, Any]) -> None:
        load = f"load average {os.getloadavg()[0]:.1f} at its end"
        out: Path = self._asked.out
        known = json.loads(out.read_text())["measurements"] if out.exists() else []
        kept = [one for one in known if one["what"] != what]
        kept.append({"what": what, **self._common, "load": load, **figures})
        out.write_text(json.dumps({"benchmark": out.stem, "measurements": kept}, indent=1) + "\n")

    async def stages(self) -> None:
        """Fig. 8."""
        slo = {**group_starts.HARSH, "ttft_ms": 1000 * group_starts.WITHIN_S}
        for stages in STAGES:
            asked = [Asked(f"s = {stages}", group_starts.HARSH, stages)]
            if stages == max(STAGES):
                asked.append(Asked(f"chosen for {group_starts.WITHIN_S:g} s", slo))
            await self._starts({"PILOTLIGHT_MAX_STAGES": str(stages)}, asked)

    async def ladder(self) -> None:
        """Fig. 9."""
        for rung, settings in group_starts.ladder(max(STAGES)).items():
            stages = int(settings["PILOTLIGHT_MAX_STAGES"])
            await self._starts(settings, [Asked(rung, group_starts.HARSH, stages)])

    async def bursts(self) -> None:
        """Fig. 14."""
        for stages in STAGES:
            print(f"groups of {stages}", file=sys.stderr, flush=True)
            with folder() as path:
                found = await group_bursts.measure_bursts(
                    path,
                    self._hosts(BURST_NODES),
                    [BURST_RATE] * BURST_NODES,
                    self._asked.bursts,
                    {"PILOTLIGHT_MAX_STAGES": str(stages), **self._more},
                    self._asked.log,
                )
            for size, burst in found.items():
                self._keep(f"{size} requests, groups of {stages}", group_bursts.figures_of(burst))

    async def _starts(self, settings: dict[str, str], asked: Sequence[Asked]) -> None:
        """Measure starts of one cluster. What another part has measured under the same settings
        counts here, too, and says so.
        """
        key = tuple(sorted(settings.items()))
        new = [one for one in asked if (key, one.slo["ttft_ms"]) not in self._measured]
        if new:
            print(", ".join(one.what for one in new), file=sys.stderr, flush=True)
            with folder() as path:
                found = await group_starts.measure_starts(
                    path,
                    self._hosts(NODES),
                    [self._asked.rate] * NODES,
                    self._asked.rounds,
                    {**settings, **self._more},
                    [one.slo for one in new],
                    self._asked.log,
                )
            for one, starts in zip(new, found, strict=True):
                self._measured[key, one.slo["ttft_ms"]] = one.what, starts
        for one in asked:
            measured_as, starts = self._measured[key, one.slo["ttft_ms"]]
            self._count(one, starts, measured_as)

    def _count(self, asked: Asked, starts: Sequence[Start], measured_as: str) -> None:
        """Keep starts, but those that the scheduler gave another number of stages."""
        counted = [one for one in starts if asked.stages in (None, one.stages)]
        if not counted:
            print(
                f"  no start of {asked.what} had {asked.stages} stages: not kept", file=sys.stderr
            )
            return
        same = {"starts": f"those of {measured_as}"} if measured_as != asked.what else {}
        self._keep(asked.what, {**group_starts.figures_of(counted), **same})


@contextmanager
def folder() -> Generator[Path]:
    """A temporary folder through which PostgreSQL, which runs as another user, may pass."""
    with tempfile.TemporaryDirectory(prefix="pilotlight-groups-") as name:
        path = Path(name)
        path.chmod(0o711)
        yield path


async def measure(asked: argparse.Namespace) -> None:
    """All parts, one after the other; within the namespace of control."""
    bench = Bench(asked)
    for part in asked.parts.split(","):
        await {"stages": bench.stages, "ladder": bench.ladder, "bursts": bench.bursts}[part]()


def groups(asked: argparse.Namespace) -> Iterator[tuple[str, list[str | None]]]:
    """Parts that share a network, and its links behind control and store."""
    parts: list[str] = asked.parts.split(",")
    if starts_of := [part for part in parts if part != "bursts"]:
        yield ",".join(starts_of), [asked.rate] * NODES
    if "bursts" in parts:
        yield "bursts", [BURST_RATE] * BURST_NODES


def main() -> None:
    """Make the namespaces of each network, and go on within the first of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=3, help="starts of each kind that count")
    parser.add_argument("--rate", default=RATE, help="of each node's link")
    parser.add_argument("--bursts", type=int, nargs="+", default=list(BURSTS))
    parser.add_argument("--set", nargs="*", default=[], help="more settings, NAME=VALUE")
    parser.add_argument("--out", type=Path, default=BENCH / "results" / "groups.json")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="of the store")
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if unknown := set(asked.parts.split(",")) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if asked.inside:
        asyncio.run(measure(asked))
        return
    for parts, rates in groups(asked):
        if status := _within(parts, rates):
            sys.exit(status)


def _within(parts: str, rates: list[str | None]) -> int:
    """Run parts in a network of their own; the status."""
    prefix = f"{PREFIX}{os.getpid()}"
    more = ["--parts", parts, "--inside", prefix]
    try:
        with network([None, None, *rates]) as hosts:
            command = hosts[0].inside(sys.executable, *sys.argv, *more)
            return subprocess.run(command, check=False).returncode
    finally:
        # Of loaders that were killed with their namespaces.
        for pool in SHARED_MEMORY.glob(f"pilotlight-{prefix}-*.pool"):
            pool.unlink()


if __name__ == "__main__":
    main()
