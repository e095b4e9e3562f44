"""``pilotlight model add``: what a user may name as a source, and what is said of the rest."""

import json
from pathlib import Path

import pytest

from pilotlight.cli.main import run
from pilotlight.cli.models import uri_of
from pilotlight.common.errors import BadRequest, PilotlightError, UriNotAllowed


def test_folders_and_uris(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "s3:odd").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (
        uri_of("org/name", elsewhere=False)
        == uri_of("~/org/name", elsewhere=False)
        == (tmp_path / "org" / "name").as_uri()
    )
    assert uri_of("s3:odd", elsewhere=False) == (tmp_path / "s3:odd").as_uri()
    assert uri_of("/not/here", elsewhere=True) == "file:///not/here"
    with pytest.raises(BadRequest, match="there is no folder /not/here"):
        uri_of("/not/here", elsewhere=False)
    for uri in ("s3://bucket/prefix", "hf://org/name@main", "HF://org/name", "file:///not/here"):
        assert uri_of(uri, elsewhere=False) == uri


@pytest.mark.parametrize(
    ("source", "error", "told"),
    [
        ("org/missing", BadRequest, "hf://org/name"),
        ("s3:/bucket/prefix", BadRequest, "two slashes"),
        ("hf:org/name", BadRequest, "two slashes"),
        ("s3://Bucket/x", UriNotAllowed, "lower-case"),
        ("hf://org", UriNotAllowed, "org/name"),
        ("https://huggingface.co/org/name", UriNotAllowed, "hf://org/name"),
    ],
)
def test_the_rest_is_refused_before_anything_is_sent(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    error: type[PilotlightError],
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PILOTLIGHT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PILOTLIGHT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("PILOTLIGHT_ADMIN_KEY", "key")
    assert run(["model", "add", "tiny", source, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)["error"]
    assert answer["code"] == error.code
    assert told in answer["message"]
    assert answer["what_to_do"]
