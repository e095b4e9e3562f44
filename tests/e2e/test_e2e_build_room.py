"""A model that has lent itself its whole device is materialized beside its serving instance: the
loan makes way for the build, the build makes way for requests, and the loan comes back.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from embedded_system import RunningSystem, copied, eventually, running
from materialized_system import build_children, builds, materials

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NAME, LARGE = "lender", "large"
DEVICE_BYTES = 128 * 2**20
"""Three times what the model needs at least: a build fits beside its grant, and not beside all
that it is lent."""
PROMPTS = [[2 + number, *range(40, 740)] for number in range(16)]
OUTPUT_TOKENS = 24
BUILD_S = 180.0


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSystem]:
    """One worker, in a dtype in which batches do not matter."""
    home: Path = tmp_path_factory.mktemp("lent-room")
    home.chmod(0o711)
    copied(home / "models", NAME)
    environment = {
        "PILOTLIGHT_MODEL_ROOTS": str(home / "models"),
        "PILOTLIGHT_DEVICE_BYTES": str(DEVICE_BYTES),
        "PILOTLIGHT_BUILD_IDLE_S": "0.5",
        "PILOTLIGHT_ARTIFACT_UPKEEP_INTERVAL_S": "0.5",
    }
    with running(home / "home", environment=environment) as started:
        new = {
            "name": NAME,
            "uri": (home / "models" / NAME).as_uri(),
            "dtype": "float32",
            "keep_alive_s": 3600,
            "slo": {"ttft_ms": 5000, "tpot_ms": 200},
        }
        with started.admin() as admin:
            assert admin.post("/models", json=new).status_code == 201
        yield started


def complete(system: RunningSystem, prompt: list[int]) -> str:
    with system.openai() as client:
        answer = client.completions.create(
            model=NAME,
            prompt=prompt,
            max_tokens=OUTPUT_TOKENS,
            temperature=0,
            seed=1,
            extra_body={"ignore_eos": True},
        )
    return answer.choices[0].text


def together(system: RunningSystem) -> list[str]:
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        return list(clients.map(lambda prompt: complete(system, prompt), PROMPTS))


def worker(system: RunningSystem) -> dict[str, Any]:
    with system.admin() as admin:
        (found,) = admin.get("/workers").json()["workers"]
    return found


def held(system: RunningSystem) -> dict[str, Any]:
    """The one stage, as its worker reported it last."""
    (found,) = worker(system)["held"]
    return found


def lent_all(system: RunningSystem) -> dict[str, Any] | None:
    """The stage, once it has lent itself nearly all of the device."""
    found = held(system)
    taken_bytes = found["device_bytes"] + found["loan"]["lent_bytes"]
    return found if DEVICE_BYTES - taken_bytes < DEVICE_BYTES // 8 else None


def test_a_model_that_lent_itself_the_device_is_materialized_beside_its_instance(
    system: RunningSystem,
) -> None:
    expected = [complete(system, prompt) for prompt in PROMPTS]
    assert together(system) == expected
    before = eventually(lambda: lent_all(system))
    free_bytes = DEVICE_BYTES - before["device_bytes"] - before["loan"]["lent_bytes"]

    system.cli("materialize", NAME, "--no-wait")

    def building() -> Any:
        found = worker(system)
        return found if found["build"]["taken_bytes"] and builds(system, NAME, "building") else None

    during = eventually(building, BUILD_S)
    (stage,) = during["held"]
    taken_bytes = during["build"]["taken_bytes"]
    assert taken_bytes > free_bytes, "there was no such room before"
    lent_bytes = stage["loan"]["lent_bytes"]
    assert stage["device_bytes"] + lent_bytes + taken_bytes <= DEVICE_BYTES
    assert stage["loan"]["offered_bytes"] == before["loan"]["offered_bytes"]
    eventually(lambda: build_children(system), BUILD_S)

    # Requests end it at once, and lose nothing.
    assert together(system) == expected
    eventually(lambda: worker(system)["build"]["taken_bytes"] == 0)

    (artifact,) = eventually(lambda: materials(system, NAME)["artifacts"], BUILD_S)
    assert artifact["kind"] == "manifest"
    (build,) = materials(system, NAME)["builds"]
    assert build["state"] == "built"
    assert build["attempt"] > 1, "it made way, and was taken up again"
    eventually(lambda: worker(system)["build"]["wanted_bytes"] == 0)
    assert not build_children(system)

    assert together(system) == expected
    after = eventually(lambda: lent_all(system))
    assert after["instance_id"] == before["instance_id"], "it served all the time"


def test_a_build_that_can_have_no_room_waits_and_says_so(
    system: RunningSystem, tmp_path: Path
) -> None:
    """Beside the grants of what serves there is too little for it, and it is no try that failed."""
    with system.admin() as admin:
        folder = Path(system.home).parent / "models" / LARGE
        copied(folder.parent, LARGE)
        new = {
            "name": LARGE,
            "uri": folder.as_uri(),
            "dtype": "float64",
            "materialize": "auto",
            "slo": {"ttft_ms": 5000, "tpot_ms": 200},
        }
        reply = admin.post("/models", json=new)
        assert reply.status_code == 201, reply.text
    (build,) = eventually(lambda: builds(system, LARGE, "waiting"), BUILD_S)
    assert build["attempt"] == 0
    assert build["reason"].startswith("no_room: waiting for room: ")
    with system.admin() as admin:
        assert admin.post(f"/models/{NAME}/evict").status_code == 202
    (artifact,) = eventually(lambda: materials(system, LARGE)["artifacts"], BUILD_S)
    assert artifact["kind"] == "manifest"
