"""Several schedulers and several gateways: one dies, the others go on."""

import os
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import psycopg
import pytest
from embedded_system import DEADLINE_S, DEMO_FOLDER, RunningSystem, running

from pilotlight.cli.embedded import PostgresServer
from pilotlight.cli.home import Home
from pilotlight.common.testing import until
from pilotlight.scheduler.lease import LEASE_S

pytestmark = [pytest.mark.anyio, pytest.mark.e2e, pytest.mark.slow]

MODEL = "ember-7m"
QUESTION = [{"role": "user", "content": "What is a pilot light?"}]
TOKENS = 32


@pytest.fixture(scope="module")
def system() -> Iterator[RunningSystem]:
    with tempfile.TemporaryDirectory(prefix="pilotlight-e2e-") as folder:
        os.chmod(folder, 0o711)
        arguments = ("--schedulers", "3", "--gateways", "2", "--caches", "2", "--with-demo-model")
        with running(Path(folder) / "home", *arguments) as started:
            yield started


class Schedulers:
    """Which processes there are, and which leads: by their own metrics and by the lease's row."""

    def __init__(self, system: RunningSystem) -> None:
        self._home = Home(system.home)
        self._owner_url = PostgresServer(
            system.home / "postgres", self._home.secret("postgres-owner")
        ).owner_url

    def pids(self, service: str) -> set[int]:
        found = {
            int(path.stem.rpartition("-")[2])
            for path in self._home.run_dir.glob(f"{service}-*.sock")
        }
        return {pid for pid in found if Path(f"/proc/{pid}").exists()}

    def epochs(self) -> dict[int, float]:
        """Epoch of each scheduler that answers; 0 of a standby."""
        found: dict[int, float] = {}
        for pid in self.pids("scheduler"):
            transport = httpx2.HTTPTransport(uds=str(self._home.run_dir / f"scheduler-{pid}.sock"))
            with httpx2.Client(transport=transport, base_url="http://local", timeout=2.0) as http:
                try:
                    lines = http.get("/metrics").text.splitlines()
                except httpx2.TransportError:
                    continue
            found[pid] = next(
                float(line.split()[1])
                for line in lines
                if line.startswith("pilotlight_scheduler_epoch ")
            )
        return found

    def leading(self) -> list[tuple[int, float]]:
        return [(pid, epoch) for pid, epoch in self.epochs().items() if epoch]

    async def leader(self, above: float = 0) -> tuple[int, float]:
        """The only leader, with an epoch above one, once every scheduler answers."""
        found: list[tuple[int, float]] = []

        def one() -> bool:
            found[:] = self.leading() if len(self.epochs()) == 3 else []
            return len(found) == 1 and found[0][1] > above

        await until(one, deadline_s=DEADLINE_S)
        return found[0]

    def row(self) -> tuple[str, int]:
        holder, epoch, _ = self._lease()
        return holder, epoch

    def expiry_s(self) -> float:
        """By the database's clock."""
        return self._lease()[2]

    def _lease(self) -> tuple[str, int, float]:
        with psycopg.connect(self._owner_url) as connection:
            row = connection.execute(
                "SELECT holder, epoch, extract(epoch FROM expires_at)::float FROM scheduler.lease"
            ).fetchone()
        assert row is not None
        return row


def chat(system: RunningSystem) -> str:
    with system.openai() as client:
        reply = client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            max_tokens=TOKENS,
        )
    return reply.choices[0].message.content or ""


async def unload(system: RunningSystem) -> None:
    with system.admin() as admin:
        admin.post(f"/models/{MODEL}/evict")

        def unloaded() -> bool:
            return not any(worker["held"] for worker in admin.get("/workers").json()["workers"])

        await until(unloaded, deadline_s=DEADLINE_S)


async def ask_while(system: RunningSystem, pid: int, number: signal.Signals) -> str:
    """Ask for a model that is loaded nowhere at the moment at which the leader is signalled."""
    await unload(system)
    os.kill(pid, number)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(chat, system)
        await until(asked.done, deadline_s=DEADLINE_S)
    return asked.result()


async def test_a_request_that_is_held_while_nobody_leads_completes(system: RunningSystem) -> None:
    schedulers = Schedulers(system)
    expected = chat(system)
    assert expected
    pid, epoch = await schedulers.leader()
    assert await ask_while(system, pid, signal.SIGKILL) == expected
    assert (await schedulers.leader(above=epoch))[0] != pid


async def test_a_leader_that_was_stopped_does_nothing_when_it_goes_on(
    system: RunningSystem,
) -> None:
    schedulers = Schedulers(system)
    expected = chat(system)
    pid, epoch = await schedulers.leader()
    assert await ask_while(system, pid, signal.SIGSTOP) == expected, "another took over"
    holder, next_epoch = schedulers.row()
    assert next_epoch > epoch
    before = instances(system)
    os.kill(pid, signal.SIGCONT)
    await until(lambda: schedulers.epochs().get(pid) == 0, deadline_s=DEADLINE_S)
    assert schedulers.row() == (holder, next_epoch)
    assert (await schedulers.leader())[1] == next_epoch
    assert instances(system) == before
    assert chat(system) == expected


async def test_a_leader_that_ends_in_order_leaves_no_gap(system: RunningSystem) -> None:
    """It gives its lease back: the next one need not wait until it has run out."""
    schedulers = Schedulers(system)
    pid, epoch = await schedulers.leader()
    runs_out_s = schedulers.expiry_s()
    os.kill(pid, signal.SIGTERM)
    await until(lambda: schedulers.row()[1] > epoch, deadline_s=DEADLINE_S)
    assert schedulers.expiry_s() - LEASE_S < runs_out_s, (
        "the next term began when the last one ran out"
    )
    await schedulers.leader(above=epoch)


def instances(system: RunningSystem) -> list[tuple[str, str, int]]:
    with system.admin() as admin:
        found = admin.get("/instances").json()["instances"]
    return sorted(
        (one["instance_id"], one["state"], one["epoch"])
        for one in found
        if one["state"] not in ("gone", "failed")
    )


async def test_two_gateways_share_an_address_and_one_suffices(system: RunningSystem) -> None:
    schedulers = Schedulers(system)
    pids = schedulers.pids("gateway")
    assert len(pids) == 2
    assert scraped(system) == {str(pid) for pid in pids}
    killed = min(pids)
    expected = chat(system)
    os.kill(killed, signal.SIGSTOP)
    os.kill(killed, signal.SIGKILL)
    # Until it is reaped a thread of it may still hold the port: the kernel gives it connections.
    await until(lambda: not Path(f"/proc/{killed}").exists(), deadline_s=DEADLINE_S)
    assert [chat(system) for _ in range(4)] == [expected] * 4
    await until(
        lambda: (
            len(schedulers.pids("gateway")) == 2
            and scraped(system) == {str(p) for p in schedulers.pids("gateway")}
        )
    )


async def test_what_one_gateway_registers_the_other_serves_at_once(system: RunningSystem) -> None:
    for number in range(4):
        body = {
            "name": f"shared-{number}",
            "uri": DEMO_FOLDER.as_uri(),
            "slo": {"ttft_ms": 5000, "tpot_ms": 200},
        }
        # A connection for each: the kernel gives them to either gateway.
        with system.admin() as admin:
            assert admin.post("/models", json=body).status_code == 201
        with httpx2.Client(
            base_url=system.url, headers={"Authorization": f"Bearer {system.key('api')}"}
        ) as http:
            assert http.get(f"/v1/models/shared-{number}").status_code == 200


def scraped(system: RunningSystem) -> set[str]:
    """Processes of gateways in the metrics, whichever answers."""
    lines = httpx2.get(f"{system.url}/metrics", timeout=10).text.splitlines()
    return {
        line.split('process="')[1].split('"')[0] for line in lines if 'service="gateway"' in line
    }


def test_a_port_that_gateways_share_is_still_one_systems_own(system: RunningSystem) -> None:
    """Another system would take half of its connections."""
    port = system.url.rsplit(":", 1)[1]
    with tempfile.TemporaryDirectory(prefix="pilotlight-e2e-") as folder:
        os.chmod(folder, 0o711)
        other = RunningSystem(home=Path(folder) / "home", url="", process=system.process)
        refused = other.cli("up", "--gateways", "2", "--port", port, status=1)
    assert refused["error"]["code"] == "port_taken"
