"""schemathesis (MIT) over both OpenAPI documents: no 5xx, no status and no body that they do not
describe.

What else it can look for is left out, for JSON Schema cannot say it: that two fields go together
(``min_instances`` above ``max_instances``), and that names with slashes in them share their paths
with actions, so that a method of the one gets no 405 at the other.
"""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from embedded_system import RunningSystem, running

pytestmark = [pytest.mark.clients, pytest.mark.slow]

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
LIMIT_S = 900
SEED, EXAMPLES = "20", os.environ.get("PILOTLIGHT_DOCUMENT_EXAMPLES", "5")


@pytest.fixture(scope="module")
def system() -> Iterator[RunningSystem]:
    """A whole system, whose workers are simulated: what is asked is valid and means nothing."""
    with tempfile.TemporaryDirectory(prefix="pilotlight-documents-") as folder:
        os.chmod(folder, 0o711)
        with running(Path(folder) / "home", "--worker-kind", "sim", "--with-demo-model") as made:
            yield made


@pytest.mark.parametrize(
    ("document", "base", "key", "without"),
    [
        # A stream has no end.
        ("/admin/v1/openapi.json", "/admin/v1", "admin", ("--exclude-path", "/stream")),
        ("/v1/openapi.json", "", "api", ()),
    ],
)
def test_answers_are_as_documented(
    system: RunningSystem, document: str, base: str, key: str, without: tuple[str, ...]
) -> None:
    command = Path(os.environ["PILOTLIGHT_CLIENTS_FOLDER"]) / "others" / "bin" / "schemathesis"
    done = subprocess.run(
        [
            str(command),
            "run",
            f"{system.url}{document}",
            "--url",
            f"{system.url}{base}",
            "--header",
            f"Authorization: Bearer {system.key(key)}",
            "--checks",
            CHECKS,
            "--phases",
            "coverage,fuzzing",
            "--max-examples",
            EXAMPLES,
            "--seed",
            SEED,
            "--suppress-health-check",
            "all",
            "--request-timeout",
            "60",
            "--generation-database",
            "none",
            "--no-color",
            *without,
        ],
        cwd=system.home.parent,
        env={name: text for name, text in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    print(done.stdout[-1500:])
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-1000:]
