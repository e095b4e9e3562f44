"""Clients' own tests, and what their libraries do, against a whole system.

``make test-clients`` installs them. Of the tests of OpenAI's and Anthropic's clients those run that
ask for what there is: they send the fields of their documents' examples, of which "all params" are
more than any one server takes, and ids that only their mock knows. So none of OpenAI's tests of
Responses runs: they create one without an input, and get and delete one that was never made. Its
tests of embeddings run against a small embedder with random weights, but for strict clients that
name no encoding: the client itself asks for base64 then, and takes floats alone for valid.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from client_suites import ASYNC_INI, SUITES, passed, run, told
from embedded_system import DEMO_FOLDER, RunningSystem, running
from pooled_models import save_pooled, save_tokenizer

pytestmark = [pytest.mark.clients, pytest.mark.slow]

EMBEDDER = "text-embedding-3-small"
"""What OpenAI's tests call their embedder."""
ALIASES = "gpt-6-astra gpt-3.5-turbo-instruct claude-opus-5-5 model"
"""What the tests of the clients call their models."""
CREATED = "create_overload and not all_params"
LISTED = "(list and not all_params) or path_params"


@dataclass(frozen=True)
class Part:
    """Tests of a client's own suite."""

    client: str
    file: str
    chosen: str
    at_least: int
    """Tests that must have passed, each way of the client counted."""


PARTS = (
    Part("openai", "chat/test_completions.py", CREATED, 30),
    Part("openai", "test_completions.py", CREATED, 30),
    Part("openai", "test_models.py", "list or retrieve", 30),
    Part("openai", "test_files.py", LISTED, 20),
    Part("openai", "test_batches.py", LISTED, 20),
    Part("openai", "test_embeddings.py", "loose or all_params", 11),
    Part("anthropic", "test_messages.py", f"({CREATED}) or (count_tokens and not all_params)", 40),
)


@pytest.fixture(scope="module")
def system() -> Iterator[RunningSystem]:
    """A whole system with the demo model, which has the names of others, too, and an embedder."""
    with tempfile.TemporaryDirectory(prefix="pilotlight-clients-") as folder:
        os.chmod(folder, 0o711)
        aliases = ",".join(f"{name}=ember-7m" for name in ALIASES.split())
        embedder = Path(folder) / "embedder"
        embedder.mkdir()
        save_pooled("bert", embedder, mode="mean")
        save_tokenizer("bert", embedder)
        environment = {
            "PILOTLIGHT_MODEL_ALIASES": aliases,
            "PILOTLIGHT_MODEL_ROOTS": f"{embedder},{DEMO_FOLDER}",
        }
        with running(Path(folder) / "home", "--with-demo-model", environment=environment) as made:
            made.cli("model", "add", EMBEDDER, str(embedder))
            yield made


@pytest.fixture(scope="module")
def installed() -> Path:
    """Where ``tools/test_clients.sh`` has put everything."""
    return Path(os.environ["PILOTLIGHT_CLIENTS_FOLDER"])


def prepared(installed: Path, client: str, work: Path) -> Path:
    """The source of a client, whose tests have our key, and ask for what the demo model's 1,024
    tokens of context have room for.
    """
    source = work / client
    shutil.copytree(installed / client, source)
    conftest = source / "tests" / "conftest.py"
    text = conftest.read_text()
    ours = re.sub(r"^api_key = .*$", 'api_key = os.environ["PILOTLIGHT_API_KEY"]', text, flags=re.M)
    assert ours != text
    conftest.write_text(ours)
    for file in (source / "tests" / "api_resources").glob("test_messages.py"):
        file.write_text(file.read_text().replace("max_tokens=1024", "max_tokens=64"))
    return source


@pytest.mark.parametrize("part", PARTS, ids=[f"{one.client} {one.file}" for one in PARTS])
def test_a_clients_own_tests(
    system: RunningSystem, installed: Path, tmp_path: Path, part: Part
) -> None:
    source = prepared(installed, part.client, tmp_path)
    report = tmp_path / "report.xml"
    python = installed / "official" / "bin" / "python"
    options = ["-o", "addopts=", "-p", "no:cacheprovider", "-q", "--junitxml", str(report)]
    file = f"tests/api_resources/{part.file}"
    base_url = system.url + ("/v1" if part.client == "openai" else "")
    run(
        [str(python), "-m", "pytest", *options, file, "-k", part.chosen],
        source,
        told(system, TEST_API_BASE_URL=base_url),
    )
    assert passed(report) >= part.at_least


@pytest.mark.parametrize(("suite", "at_least"), [("langchain", 15), ("litellm", 9), ("ollama", 6)])
def test_other_clients(
    system: RunningSystem, installed: Path, tmp_path: Path, suite: str, at_least: int
) -> None:
    # Outside of this project, whose fixtures need its packages.
    shutil.copy(SUITES / f"{suite}_suite.py", tmp_path)
    (tmp_path / "pytest.ini").write_text(ASYNC_INI)
    report = tmp_path / "report.xml"
    python = installed / "others" / "bin" / "python"
    options = ["-p", "no:cacheprovider", "-q", "--tb=short", "--junitxml", str(report)]
    run([str(python), "-m", "pytest", *options, f"{suite}_suite.py"], tmp_path, told(system))
    assert passed(report) >= at_least


def test_openais_client_for_node(system: RunningSystem, installed: Path) -> None:
    # Beside what it imports.
    shutil.copy(SUITES / "openai_node.test.mjs", installed / "node")
    run(["node", "--test", "openai_node.test.mjs"], installed / "node", told(system))
