"""What holds for docker-compose.yml, its override and the Dockerfile, without an engine: every
container is locked down.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pilotlight.common.credentials import HOLDERS

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
STANDIN: dict[str, Any] = yaml.safe_load((ROOT / "compose.standin.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
ONE_SHOT = ("setup", "migrations")
OURS = ("setup", "migrations", "gateway", "scheduler", "cache", "materializer", "node", "node-gpu")
"""Their image names its user."""
SECRETS = "/run/pilotlight-secrets"
REACHABLE = {"gateway", "prometheus", "grafana", "jaeger"}
GOES_OUT = REACHABLE | {"node", "node-gpu"}

every_service = pytest.mark.parametrize("name", SERVICES)


@every_service
def test_locked_down(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"]
    assert service["pids_limit"] > 0
    assert service["logging"]["options"]["max-size"]
    assert not service.keys() & {"privileged", "cap_add", "pid", "ipc", "userns_mode", "devices"}


@every_service
def test_not_root(name: str) -> None:
    if name in OURS:
        assert "user" not in SERVICES[name]
        assert re.search(r"^USER 10001:10001$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    else:
        assert int(SERVICES[name]["user"].split(":")[0]) > 0


@every_service
def test_comes_back_and_says_how_it_is(name: str) -> None:
    service = SERVICES[name]
    if name in ONE_SHOT:
        assert service["restart"] == "no"
        assert service["healthcheck"] == {"disable": True}
    else:
        assert service["restart"] == "unless-stopped"
        assert service["healthcheck"]["test"][0] == "CMD"
        assert service["healthcheck"]["interval"]


@every_service
def test_waits_for_what_it_needs(name: str) -> None:
    for other, wait in SERVICES[name].get("depends_on", {}).items():
        wanted = "service_completed_successfully" if other in ONE_SHOT else "service_healthy"
        assert wait["condition"] == wanted


@every_service
def test_reached_from_this_host_alone(name: str) -> None:
    service = SERVICES[name]
    ports = service.get("ports", [])
    assert bool(ports) == (name in REACHABLE)
    assert all(str(port).startswith("127.0.0.1:") for port in ports)
    if name == "setup":
        assert service["network_mode"] == "none"
    else:
        assert ("outside" in service["networks"]) == (name in GOES_OUT)
        assert "inside" in service["networks"]


def test_inside_has_no_way_out() -> None:
    assert COMPOSE["networks"]["inside"] == {"internal": True}


@every_service
def test_holds_its_own_secrets_alone(name: str) -> None:
    mounts = [
        volume.split(":")
        for volume in SERVICES[name].get("volumes", [])
        if volume.startswith("secrets")
    ]
    if name == "setup":
        assert {source for source, *_ in mounts} == {
            source for source in COMPOSE["volumes"] if source.startswith("secrets")
        }
        return
    assert len(mounts) <= 1
    for source, target, *options in mounts:
        assert source == f"secrets-{name.removesuffix('-gpu')}"
        assert (target, options) == (SECRETS, ["ro"])


def test_setup_fills_every_folder_of_secrets() -> None:
    mounted = {
        volume.split(":")[1].rpartition("/")[2]
        for volume in SERVICES["setup"]["volumes"]
        if volume.startswith("secrets")
    }
    assert mounted == {"all", "nats", "s3", *HOLDERS}
    made = re.search(r"for name in (all [a-z0-9 ]+); do", (ROOT / "Dockerfile").read_text())
    assert made is not None
    assert set(made[1].split()) == mounted


def test_a_volume_keeps_the_owner_that_setup_gives_it() -> None:
    made = {
        volume.split(":")[0]
        for volume in SERVICES["setup"]["volumes"]
        if "/volumes/data/" in volume
    }
    used = [
        volume.split(":")
        for name in SERVICES.keys() - {"setup"}
        for volume in SERVICES[name].get("volumes", [])
    ]
    assert {source for source, *_ in used} >= made == {"nats-data", "s3-data", "spans"}
    assert all(options == ["nocopy"] for source, _, *options in used if source in made)


def test_images_do_not_take_the_modes_of_the_checkout() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert "COPY --chmod=0755 deploy/image /opt/pilotlight/bin/" in text
    assert "chmod -R a+rX /opt/pilotlight/migrations" in text


def test_no_secret_in_the_environment() -> None:
    for name, service in SERVICES.items():
        for variable, value in service.get("environment", {}).items():
            if re.search(r"password|secret|token|_key", variable, re.IGNORECASE):
                assert str(value).startswith("/run/"), f"{name}: {variable}"


def test_builds_without_a_registry_of_frontends() -> None:
    text = (ROOT / "Dockerfile").read_text() + (ROOT / "docker-compose.yml").read_text()
    assert not re.search(r"^#\s*syntax=|@sha256:", text, re.MULTILINE)


def test_the_standin_pulls_nothing() -> None:
    shown = {name for name, service in SERVICES.items() if not service.get("profiles")}
    assert set(STANDIN["services"]) == shown
    assert all(service["pull_policy"] == "never" for service in STANDIN["services"].values())


def test_profiles() -> None:
    by_profile: dict[str, set[str]] = {}
    for name, service in SERVICES.items():
        for profile in service.get("profiles", [""]):
            by_profile.setdefault(profile, set()).add(name)
    assert by_profile == {
        "": {
            "setup",
            "migrations",
            "nats",
            "postgres",
            "s3",
            "otel-collector",
            *HOLDERS.keys() & set(OURS),
        },
        "gpu": {"node-gpu"},
        "observability": {"prometheus", "grafana", "jaeger"},
    }


def test_the_gpu_node_is_given_the_devices_and_is_else_the_same() -> None:
    node, gpu_node = SERVICES["node"], SERVICES["node-gpu"]
    (device,) = gpu_node["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    differing = {key for key in node.keys() | gpu_node.keys() if node.get(key) != gpu_node.get(key)}
    assert differing == {
        "profiles",
        "build",
        "image",
        "mem_limit",
        "shm_size",
        "environment",
        "volumes",
        "deploy",
    }
    assert gpu_node["environment"].items() > node["environment"].items()


@pytest.mark.parametrize("name", ["node", "node-gpu"])
def test_a_node_has_shared_memory_and_reaps_its_workers(name: str) -> None:
    assert SERVICES[name]["shm_size"]
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r'^ENTRYPOINT \["tini", "--", "serve"\]$', text, re.MULTILINE)
    assert "node) exec python -m pilotlight.loader ;;" in (ROOT / "deploy/image/serve").read_text()
    assert "command" not in SERVICES[name]
    assert "entrypoint" not in SERVICES[name]


def test_images_are_of_a_named_version_and_can_be_replaced() -> None:
    for name in SERVICES.keys() - set(OURS):
        found = re.fullmatch(
            r"\$\{PILOTLIGHT_([A-Z0-9]+)_IMAGE:-([a-z0-9/.-]+):([A-Za-z0-9.-]+)\}",
            SERVICES[name]["image"],
        )
        assert found is not None, SERVICES[name]["image"]
        assert found[3] != "latest"
    assert SERVICES["postgres"]["image"].endswith(":-postgres:17}")
    assert SERVICES["s3"]["image"].startswith("${PILOTLIGHT_S3_IMAGE:-chrislusf/seaweedfs:")


def test_what_may_be_set_is_told() -> None:
    told = (ROOT / "docs/operations/reference.md").read_text()
    asked = set(re.findall(r"\$\{([A-Z0-9_]+)", (ROOT / "docker-compose.yml").read_text()))
    asked |= {
        name
        for service in SERVICES.values()
        for name, value in service.get("environment", {}).items()
        if value is None
    }
    assert "PILOTLIGHT_POOL_BYTES" in asked
    assert not {name for name in asked if f"`{name}`" not in told}


def test_torch_comes_from_a_folder_of_wheels_or_the_index() -> None:
    built = [service["build"] for service in SERVICES.values() if "build" in service]
    assert {build["args"]["SERVICE"] for build in built} == {
        "setup",
        "gateway",
        "scheduler",
        "cache",
        "materializer",
        "node",
    }
    assert all(
        build["additional_contexts"] == {"wheels": "${PILOTLIGHT_WHEELS:-./deploy/wheels}"}
        for build in built
    )
    text = (ROOT / "Dockerfile").read_text()
    assert "--mount=type=bind,from=wheels,target=/wheels" in text
    assert "--find-links /wheels" in text
    assert "UV_DEFAULT_INDEX" in text
