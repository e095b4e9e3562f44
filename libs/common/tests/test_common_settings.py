"""What is said of settings that are wrong: by name, a line for each, and no secret."""

from pathlib import Path

import pytest

from pilotlight.common.errors import SettingsInvalid
from pilotlight.common.service import run_service
from pilotlight.common.settings import BusSettings, DatabaseSettings, S3Settings, ServiceSettings


class Both(ServiceSettings, DatabaseSettings):
    """As most services have."""


def refused(
    kind: type[BusSettings | DatabaseSettings | S3Settings],
    monkeypatch: pytest.MonkeyPatch,
    **values: str,
) -> list[str]:
    """The lines of the message about what the environment says."""
    for name, value in values.items():
        monkeypatch.setenv(f"PILOTLIGHT_{name}", value)
    with pytest.raises(SettingsInvalid) as caught:
        kind()
    assert caught.value.__suppress_context__, "the cause's text holds the values"
    return caught.value.message.splitlines()


def test_each_wrong_setting_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(Both, monkeypatch, DATABASE_POOL_SIZE="0", TRACE_SAMPLE_RATIO="lots") == [
        "PILOTLIGHT_DATABASE_POOL_SIZE: Input should be greater than or equal to 1, not '0'",
        "PILOTLIGHT_TRACE_SAMPLE_RATIO: Input should be a valid number, unable to parse string as a number, not 'lots'",
    ]


def test_a_check_of_ours_speaks_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = refused(S3Settings, monkeypatch, S3_ENDPOINT="http://s3.example.org")
    assert line.startswith(
        "PILOTLIGHT_S3_ENDPOINT is http://s3.example.org: set PILOTLIGHT_S3_ALLOW_HTTP=true"
    )


@pytest.mark.parametrize("url", ["https://me:hush@x", "https://x/?hush", "hush"])
def test_no_secret_is_shown(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = refused(S3Settings, monkeypatch, S3_ENDPOINT=url)
    assert line.startswith("PILOTLIGHT_S3_ENDPOINT: ")
    assert "hush" not in line
    with pytest.raises(SettingsInvalid) as caught:
        BusSettings(nats_url=b"nats://me:hush\xff@x", prefix=3)
    assert "hush" not in caught.value.message


def test_a_service_tells_it_and_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PILOTLIGHT_TRACE_SAMPLE_RATIO", "much")
    monkeypatch.setenv("PILOTLIGHT_RUN_DIR", str(tmp_path / "run"))

    async def build(_: object) -> None:
        raise AssertionError

    assert run_service("test", ServiceSettings, build) == 2
    told = capsys.readouterr().err
    assert "settings_invalid" in told
    assert "PILOTLIGHT_TRACE_SAMPLE_RATIO: " in told
    assert "not 'much'" in told
    assert not (tmp_path / "run").exists()
