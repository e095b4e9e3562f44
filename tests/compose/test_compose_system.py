"""The system under Docker Compose: built and run for real, asked, broken, and taken down.

``make test-compose``.
"""

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx2
import openai
import pytest
from composed import DEADLINE_S, SECRETS, Composed, composed, run, until

from pilotlight.common.credentials import HOLDERS

pytestmark = [pytest.mark.compose, pytest.mark.slow]

MODEL = "ember-7m"
FROM_S3 = "ember-7m-from-s3"
QUESTION = [{"role": "user", "content": "What is a pilot light?"}]
LONG: dict[str, Any] = {"max_tokens": 800, "extra_body": {"ignore_eos": True}}
FAILURES = (openai.APIError, httpx2.HTTPError)
OURS = ("gateway", "scheduler", "cache", "materializer", "node")
SERVERS = ("nats", "postgres", "s3", "otel-collector")
BREAKABLE = ("scheduler", "cache", "materializer", "gateway", "node", "nats", "postgres", "s3")
"""The collector is not among them: its image holds nothing that could kill it."""


@pytest.fixture(scope="module")
def system() -> Iterator[Composed]:
    with composed() as made:
        yield made
    left = ("docker", "ps", "--all"), ("docker", "volume", "ls"), ("docker", "network", "ls")
    for command in left:
        assert (
            run(*command, "--quiet", "--filter", f"label=com.docker.compose.project={made.project}")
            == ""
        )
    assert (
        run("docker", "images", "--quiet", "--filter", f"reference=pilotlight-*:{made.project}*")
        == ""
    )


@pytest.fixture(scope="module")
def api_key(system: Composed) -> str:
    return system.key("api-key")


@pytest.fixture(scope="module")
def admin_key(system: Composed) -> str:
    return system.key("admin-key")


@pytest.fixture(scope="module")
def cold(system: Composed, api_key: str, admin_key: str) -> "Answer":
    """The demo model is registered, from a folder and from the S3 server, and is asked for the
    first time.
    """
    with system.admin(admin_key) as admin:
        until(
            lambda: any(worker["engine_up"] for worker in admin.get("/workers").json()["workers"]),
            "a warm worker",
        )
        for name, uri in ((MODEL, f"file:///models/{MODEL}"), (FROM_S3, system.upload(MODEL))):
            body = {
                "name": name,
                "uri": uri,
                "slo": {"ttft_ms": 5000, "tpot_ms": 200},
                "keep_alive_s": 600,
            }
            made = admin.post("/models", json=body)
            assert made.status_code == 201, made.text
    return ask(system, api_key)


@pytest.fixture(scope="module")
def answer(cold: "Answer") -> str:
    """What the model says."""
    assert "light" in cold.text
    return cold.text


@pytest.fixture(scope="module")
def long_answer(system: Composed, api_key: str, answer: str) -> str:
    """What the model says when it may not stop, undisturbed."""
    return ask(system, api_key, **LONG).text


@dataclass
class Answer:
    """What has been read of an answer so far."""

    text: str = ""
    trace_id: str = ""
    begun: threading.Event = field(default_factory=threading.Event)


def ask(
    system: Composed, key: str, model: str = MODEL, *, into: Answer | None = None, **options: Any
) -> Answer:
    """Read an answer, piece by piece.

    Raises:
        APIError, HTTPError: it was refused, or broke off.
    """
    answer = into or Answer()
    asked = {
        "model": model,
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": 32,
        "stream": True,
        **options,
    }
    with (
        system.openai(key) as client,
        client.chat.completions.with_streaming_response.create(**asked) as response,
    ):
        answer.trace_id = response.headers["x-trace-id"]
        for chunk in response.parse():
            answer.text += "".join(choice.delta.content or "" for choice in chunk.choices)
            if answer.text:
                answer.begun.set()
    return answer


def says(system: Composed, key: str) -> str | None:
    """The text alone, or None while the system cannot answer."""
    try:
        return ask(system, key).text
    except FAILURES:
        return None


def test_warm_and_in_one_piece(system: Composed, api_key: str, answer: str) -> None:
    started_s = time.monotonic()
    assert ask(system, api_key).text == answer
    assert time.monotonic() - started_s < 10
    with system.openai(api_key) as client:
        whole = client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0, max_tokens=32
        )
    assert whole.choices[0].message.content == answer


def test_the_spans_of_a_cold_request_lie_in_one_trace_at_the_collector(
    system: Composed, cold: Answer
) -> None:
    until(
        lambda: (
            {"gateway", "scheduler", "loader", "worker"}
            <= system.traces().get(cold.trace_id, set())
        ),
        "one trace",
    )


def test_a_model_from_the_s3_server(system: Composed, api_key: str, answer: str) -> None:
    assert ask(system, api_key, FROM_S3).text == answer


@pytest.mark.parametrize("files", ["docker-compose.yml", "docker-compose.yml:compose.standin.yml"])
def test_every_profile_is_valid(system: Composed, files: str) -> None:
    shown = run(
        "docker",
        "compose",
        "--profile",
        "*",
        "config",
        "--services",
        environment={**system.environment, "COMPOSE_FILE": files},
    )
    assert {"node-gpu", "prometheus", "grafana", "jaeger", *OURS, *SERVERS} <= set(shown.split())


def test_metrics_show_every_service(system: Composed, answer: str) -> None:
    page = httpx2.get(f"{system.url}/metrics").text
    for service in ("gateway", "scheduler", "cache", "loader", "worker", "materializer"):
        assert f'service="{service}"' in page
    assert re.search(
        r'^pilotlight_first_tokens_total\{[^}]*model="ember-7m"[^}]*\} [1-9]', page, re.MULTILINE
    )


def test_workers_log_where_the_node_does(system: Composed, answer: str) -> None:
    logs = system.compose("logs", "--no-log-prefix", "node")
    assert '"service":"worker"' in logs


@pytest.mark.parametrize("service", [*OURS, *SERVERS])
def test_containers_are_locked_down(system: Composed, service: str) -> None:
    found = system.inspect(service)
    host = found["HostConfig"]
    assert found["Config"]["User"].split(":")[0] not in ("", "0", "root")
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert not host["CapAdd"]
    assert "no-new-privileges:true" in host["SecurityOpt"]
    assert host["Memory"] > 0
    assert host["PidsLimit"] > 0
    assert host["RestartPolicy"]["Name"] == "unless-stopped"
    assert not host["Privileged"]
    for published in (host["PortBindings"] or {}).values():
        assert {binding["HostIp"] for binding in published} == {"127.0.0.1"}


@pytest.mark.parametrize("service", OURS)
def test_processes_may_do_nothing_special(system: Composed, service: str) -> None:
    status = dict(
        line.split(":\t", 1)
        for line in system.inside(service, "cat", "/proc/1/status").splitlines()
        if ":\t" in line
    )
    assert status["Uid"].split() == ["10001"] * 4
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"].strip() == "1"
    tried = system.inside(service, "sh", "-c", "touch /opt/pilotlight/x 2>&1 || true")
    assert "Read-only file system" in tried


def test_a_node_is_a_loader_and_its_workers(system: Composed, answer: str) -> None:
    """Under an init that ends what they leave, with shared memory of the size that was set."""
    asked = "for each in /proc/[0-9]*; do tr '\\0' ' ' 2>/dev/null <$each/cmdline; echo; done"
    first, *others = system.inside("node", "sh", "-c", asked).splitlines()
    assert first.startswith("tini -- serve")
    for member in (
        "pilotlight.loader",
        "pilotlight.worker ",
        "pilotlight.worker.engine_main",
    ):
        assert any(member in f"{line} " for line in others), member
    assert system.inspect("node")["HostConfig"]["ShmSize"] == 512 << 20


@pytest.mark.parametrize("service", OURS)
def test_each_holds_its_own_secrets_alone(system: Composed, service: str) -> None:
    assert sorted(system.inside(service, "ls", "-A", SECRETS).split()) == sorted(HOLDERS[service])
    tried = system.inside(service, "sh", "-c", f"touch {SECRETS}/x 2>&1 || true")
    assert "Read-only file system" in tried
    environment = system.inside(service, "env")
    for name in HOLDERS[service]:
        if name != "s3-access-key":
            assert system.inside(service, "cat", f"{SECRETS}/{name}").strip() not in environment


def test_only_a_node_has_torch(system: Composed) -> None:
    looked = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('torch') else 3)"
    for service in OURS:
        done = system.inside(service, "sh", "-c", f'python -c "{looked}"; echo status $?')
        assert done.strip() == ("status 0" if service == "node" else "status 3"), service


@pytest.mark.parametrize("service", BREAKABLE)
def test_a_crash_is_survived(
    system: Composed, api_key: str, answer: str, long_answer: str, service: str
) -> None:
    """Every process of a container is killed while an answer streams: the answer goes on without a
    gap or a repetition, the engine starts the container again, it is healthy again, and the system
    answers as before.
    """
    before = system.inspect(service)
    assert before["State"]["Health"]["Status"] == "healthy"
    interrupted = Answer()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(ask, system, api_key, into=interrupted, **LONG)
        reading.add_done_callback(lambda _: interrupted.begun.set())
        assert interrupted.begun.wait(DEADLINE_S)
        system.crash(before["Id"])
        assert service == "gateway" or not reading.done(), (
            f"it ended before the crash: {interrupted.text}"
        )
        failed = reading.exception(DEADLINE_S)
    if service == "gateway":
        # Its connections end with it. What had come was right, and a client that asks again is
        # answered, below.
        assert isinstance(failed, FAILURES)
        assert long_answer.startswith(interrupted.text)
    else:
        assert failed is None
        assert interrupted.text == long_answer
    until(
        lambda: system.inspect(service)["RestartCount"] > before["RestartCount"],
        f"{service} started again",
    )
    until(lambda: system.health(service) == "healthy", f"{service} healthy again")
    assert until(lambda: says(system, api_key), f"an answer after the crash of {service}") == answer
    for other in (*OURS, *SERVERS):
        until(
            lambda other=other: system.health(other) == "healthy",
            f"{other} healthy after the crash of {service}",
        )


def test_killed_by_hand_and_started_again(system: Composed, api_key: str, answer: str) -> None:
    """A container that an operator kills stays down; the next ``up`` brings all back, with what was
    registered and the same keys.
    """
    killed = (*OURS, "nats", "postgres")
    system.compose("kill", *killed)
    assert set(system.services()).isdisjoint(killed)
    system.up()
    assert system.key("api-key") == api_key
    assert until(lambda: says(system, api_key), "an answer after all were killed") == answer
