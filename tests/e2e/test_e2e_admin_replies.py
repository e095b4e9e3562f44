"""Every reply of the admin API has every field that its OpenAPI document names, and no other;
commands that read them say so.
"""

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest
from embedded_system import DEADLINE_S, DEMO_FOLDER, RunningSystem, eventually, pilotlight

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NAME = "contract/ember"


class Contract:
    """Sends requests, and holds what comes back against the document."""

    def __init__(self, http: httpx2.Client) -> None:
        document: Any = http.get("/openapi.json").json()
        self._http = http
        self._paths = document["paths"]
        self._components = copy.deepcopy(document["components"])
        operations = {
            (method, path): one
            for path, ones in self._paths.items()
            for method, one in ones.items()
        }
        self.left = set(operations)
        for name in self._shown([one["responses"] for one in operations.values()]):
            schema = self._components["schemas"][name]
            if "properties" in schema:
                assert set(schema["required"]) == set(schema["properties"]), name
                schema["additionalProperties"] = False

    def asks(
        self, method: str, path: str, *, body: Any = None, query: Any = None, **names: str
    ) -> Any:
        response = self._http.request(method, path.format(**names), json=body, params=query)
        assert response.status_code < 300, response.text
        self._check(method, path, response, str(response.status_code))
        self.left.discard((method.lower(), path))
        return response.json() if response.content else None

    def streams(self, path: str, query: Any) -> None:
        """The first event is as the document says."""
        with self._http.stream("GET", path, params=query) as response:
            data = next(line[6:] for line in response.iter_lines() if line.startswith("data: "))
        schema = self._paths[path]["get"]["responses"]["200"]["content"]["text/event-stream"]
        jsonschema.validate(json.loads(data), {**schema["schema"], "components": self._components})
        self.left.discard(("get", path))

    def is_refused(
        self, status: int, method: str, path: str, *, body: Any = None, **names: str
    ) -> None:
        response = self._http.request(method, path.format(**names), json=body)
        assert response.status_code == status, response.text
        self._check(method, path, response, "default")

    def _shown(self, value: Any) -> set[str]:
        """Schemas that a part of the document refers to, directly or not."""
        if isinstance(value, list):
            return {name for item in value for name in self._shown(item)}
        if not isinstance(value, dict):
            return set()
        found = {name for item in value.values() for name in self._shown(item)}
        if "$ref" in value:
            name = value["$ref"].rpartition("/")[2]
            found |= {name} | self._shown(self._components["schemas"][name])
        return found

    def _check(self, method: str, path: str, response: httpx2.Response, status: str) -> None:
        described = self._paths[path][method.lower()]["responses"][status]
        if "content" not in described:
            assert not response.content
            return
        schema = {
            **described["content"]["application/json"]["schema"],
            "components": self._components,
        }
        jsonschema.validate(response.json(), schema)


def ask_of_tenants(contract: Contract) -> None:
    """Organizations, projects, keys and usage, from a key's making to its end."""
    contract.asks("POST", "/organizations", body={"name": "acme"})
    contract.is_refused(409, "POST", "/organizations", body={"name": "acme"})
    contract.asks("GET", "/organizations")
    contract.asks("POST", "/projects", body={"name": "acme/search"})
    changed = contract.asks(
        "PATCH", "/projects/{name}", name="acme/search", body={"models": [NAME]}
    )
    assert changed["models"] == [NAME]
    contract.asks(
        "PUT",
        "/projects/{name}/limits",
        name="acme/search",
        body={"requests_per_minute": 600, "weight": 2},
    )
    contract.asks("GET", "/projects")
    new = contract.asks("POST", "/keys", body={"label": "one", "project": "acme/search"})
    newer = contract.asks("POST", "/keys/{key_id}/rotate", key_id=new["key_id"], body={})
    limits = {"tokens_per_minute": 90_000, "concurrent_requests": 8, "tokens_per_month": 10**9}
    contract.asks("PUT", "/keys/{key_id}/limits", key_id=newer["key_id"], body=limits)
    contract.asks("GET", "/keys")
    contract.asks("DELETE", "/keys/{key_id}", key_id=newer["key_id"])
    contract.is_refused(404, "DELETE", "/keys/{key_id}", key_id=newer["key_id"])
    contract.asks("GET", "/usage")
    contract.asks("GET", "/usage/models")


def test_every_reply_is_what_its_document_says(system: RunningSystem) -> None:
    with system.admin() as http, system.openai() as client:
        contract = Contract(http)
        new = {
            "name": NAME,
            "uri": models_copy(system).as_uri(),
            "slo": {"ttft_ms": 9000, "tpot_ms": 900},
        }
        contract.asks("POST", "/models", body=new)
        contract.is_refused(409, "POST", "/models", body=new)
        contract.is_refused(422, "POST", "/models", body={**new, "nmae": 3})
        assert contract.asks("GET", "/models/{name}", name=NAME)["keep_host_copy"]
        changed = contract.asks(
            "PATCH", "/models/{name}", name=NAME, body={"slo": {"tpot_ms": 800}}
        )
        assert (changed["slo"]["ttft_ms"], changed["slo"]["tpot_ms"]) == (9000, 800)
        contract.asks("GET", "/models")
        contract.asks("POST", "/models/{name}/warm", name=NAME)
        asked = client.completions.with_raw_response.create(model=NAME, prompt="The", max_tokens=2)
        trace_id = asked.headers["x-trace-id"]

        contract.asks("POST", "/models/{name}/materialize", name=NAME)
        contract.asks("GET", "/models/{name}/materials", name=NAME)
        found = contract.asks("POST", "/models/{name}/verify", name=NAME)
        path, names = (
            "/verifications/{verification_id}",
            {"verification_id": found["verification_id"]},
        )
        ended = eventually(
            lambda: (
                (one := contract.asks("GET", path, **names))["status"] not in ("waiting", "running")
                and one
            )
        )
        assert (ended["status"], ended["difference_count"], ended["differences"]) == ("done", 0, [])

        assert contract.asks("GET", "/workers")["workers"]
        for listing in ("instances", "cold-starts", "decisions"):
            listed = eventually(
                lambda path=f"/{listing}": (
                    (page := contract.asks("GET", path)) and next(iter(page.values()))
                )
            )
            assert listed, listing
        contract.asks("GET", "/instances", query={"limit": 1})
        contract.asks("GET", "/transfers")
        assert contract.asks("GET", "/audit", query={"limit": 2})["next_before"]
        # The span that names the request ends last: then the trace is whole.
        request = {"request_id": asked.headers["x-request-id"]}
        eventually(lambda: http.get("/traces", params=request).status_code == 200)
        contract.asks("GET", "/traces/{trace_id}", trace_id=trace_id)
        assert contract.asks("GET", "/traces", query=request)["trace_id"] == trace_id
        (start, *_) = contract.asks("GET", "/cold-starts", query={"model": NAME})["cold_starts"]
        contract.asks("GET", "/cold-starts/{instance_id}", instance_id=start["instance_id"])
        contract.asks("GET", "/decisions/{decision_id}", decision_id=start["decision_id"])
        minutes = eventually(
            lambda: contract.asks("GET", "/activity", query={"model": NAME})["minutes"]
        )
        assert sum(minute["requests"] for minute in minutes) == 1
        contract.asks("GET", "/evictions")
        contract.streams("/stream", {"topic": ["models", "nodes"]})

        ask_of_tenants(contract)
        (node,) = contract.asks("GET", "/nodes")["nodes"]
        contract.asks("POST", "/nodes/{node_id}/drain", node_id=node["node_id"])
        contract.asks("DELETE", "/nodes/{node_id}/drain", node_id=node["node_id"])
        contract.is_refused(404, "DELETE", "/nodes/{node_id}/drain", node_id=node["node_id"])
        contract.asks("POST", "/models/{name}/evict", name=NAME)
        contract.asks("DELETE", "/models/{name}", name=NAME)
        contract.is_refused(404, "GET", "/models/{name}", name=NAME)
        assert not contract.left, (
            "these routes are documented, and nothing here looks at what they answer"
        )


def test_verify_says_that_a_sound_model_is_sound(system: RunningSystem) -> None:
    found = system.cli("model", "verify", "ember-7m")
    assert (found["status"], found["difference_count"], found["code"]) == ("done", 0, "")
    command = [pilotlight(), "model", "verify", "ember-7m"]
    said = subprocess.run(
        command,
        env=system.environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    assert "ember-7m is what is recorded" in said.stdout


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 13587456\n"
ODD_SOURCES: dict[str, tuple[dict[str, bytes] | None, str, str]] = {
    "weights-not-fetched": (
        {"model.safetensors": POINTER},
        "bad_checkpoint",
        "model.safetensors: is a git-lfs pointer",
    ),
    "tokenizer-not-fetched": (
        {"tokenizer.json": POINTER},
        "bad_checkpoint",
        "tokenizer.json: is a git-lfs pointer",
    ),
    "config-not-fetched": ({"config.json": POINTER}, "bad_checkpoint", "git lfs pull"),
    "gguf": (
        {"ember-q4.GGUF": b"GGUF"},
        "unsupported_model",
        "ember-q4.GGUF: GGUF files are not served",
    ),
    "gguf-with-config": (
        {"x.gguf": b"GGUF", "config.json": b"{}"},
        "unsupported_model",
        "x.gguf: GGUF files are not served",
    ),
    "adapter": (
        {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"},
        "unsupported_model",
        "adapter_config.json: is a LoRA adapter",
    ),
    "empty": ({}, "bad_checkpoint", "there is no config.json"),
    "missing": (None, "invalid_request", "there is no folder"),
}


@pytest.mark.parametrize("name", ODD_SOURCES)
def test_what_is_no_model_is_told_apart(system: RunningSystem, name: str) -> None:
    files, code, told = ODD_SOURCES[name]
    folder = system.home / "models" / "odd" / name
    if files is not None:
        folder.mkdir(parents=True)
        whole = DEMO_FOLDER.iterdir() if name.endswith("not-fetched") else ()
        for file, content in {**{file.name: file.read_bytes() for file in whole}, **files}.items():
            (folder / file).write_bytes(content)
    error = system.cli("model", "add", f"odd/{name}", str(folder), status=1)["error"]
    assert (error["code"], told in error["message"]) == (code, True), error


def models_copy(system: RunningSystem) -> Path:
    """A folder below the system's root of models that holds the demo model."""
    folder = system.home / "models" / "contract"
    folder.mkdir(parents=True)
    for file in DEMO_FOLDER.iterdir():
        (folder / file.name).symlink_to(file) if file.is_dir() else (
            folder / file.name
        ).write_bytes(file.read_bytes())
    return folder
