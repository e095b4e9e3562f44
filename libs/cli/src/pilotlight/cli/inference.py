"""The inference API, as the commands use it."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from pilotlight.cli.chat_stream import AnswerLines, Part
from pilotlight.cli.client import SystemNotRunning, error_from
from pilotlight.cli.home import Home
from pilotlight.common.errors import BadRequest, TransientError

DEADLINE_S = 30.0
SILENCE_S = 300.0
"""A stream without a byte for so long is given up. A held request gets a comment every second."""


@dataclass(frozen=True, slots=True)
class Access:
    """Where the inference API is, and with which key."""

    url: str
    key: str

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], home: Home) -> "Access":
        """PILOTLIGHT_URL and PILOTLIGHT_API_KEY, else the system that runs on the state folder.

        Raises:
            SystemNotRunning: neither is there.
        """
        url, key = environment.get("PILOTLIGHT_URL"), environment.get("PILOTLIGHT_API_KEY")
        if url is None:
            running = home.running()
            if running is None:
                raise SystemNotRunning(f"no system runs on {home.root}")
            url = running.url
        if key is None:
            try:
                key = home.api_key.read_text().strip()
            except OSError as error:
                raise SystemNotRunning(
                    f"PILOTLIGHT_API_KEY is not set, and {home.api_key} cannot be read: {error.strerror}"
                ) from error
        return cls(url.rstrip("/"), key)

    @property
    def headers(self) -> dict[str, str]:
        """With every request."""
        return {"Authorization": f"Bearer {self.key}"}


@dataclass(frozen=True, slots=True)
class Stream:
    """An answer that is under way."""

    headers: Mapping[str, str]
    parts: Generator[Part]


class InferenceClient:
    """Calls ``/v1`` with an inference key; errors come back as the taxonomy's."""

    def __init__(self, access: Access) -> None:
        """Nothing is sent yet.

        Raises:
            BadRequest: the URL or the key cannot be one.
        """
        try:
            self._http = httpx2.Client(
                base_url=access.url, headers=access.headers, timeout=DEADLINE_S
            )
        except (httpx2.InvalidURL, UnicodeEncodeError) as error:
            raise BadRequest(
                f"PILOTLIGHT_URL or PILOTLIGHT_API_KEY is not valid: {error}"
            ) from error

    def __enter__(self) -> "InferenceClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def models(self) -> list[dict[str, Any]]:
        """What can be asked, with its state.

        Raises:
            PilotlightError: the gateway cannot be asked, or refuses.
        """
        try:
            response = self._http.get("/v1/models")
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise SystemNotRunning(f"cannot reach {self._http.base_url}: {error}") from error
        if response.status_code >= 400:
            raise error_from(response)
        return response.json()["data"]

    @contextmanager
    def chat(self, body: Mapping[str, Any]) -> Generator[Stream]:
        """Stream the answer to a conversation; leaving early cancels it.

        Raises:
            PilotlightError: it is refused, ends with an error, or the connection breaks.
        """
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        patience = httpx2.Timeout(DEADLINE_S, read=SILENCE_S)
        try:
            with self._http.stream(
                "POST", "/v1/chat/completions", json=asked, timeout=patience
            ) as response:
                if response.status_code >= 400:
                    response.read()
                    raise error_from(response)
                yield Stream(response.headers, _parts(response))
        except httpx2.TimeoutException as error:
            raise TransientError(f"the gateway said nothing for {SILENCE_S:g} s") from error
        except httpx2.ConnectError as error:
            raise SystemNotRunning(f"cannot reach {self._http.base_url}: {error}") from error
        except httpx2.HTTPError as error:
            raise TransientError(f"the connection to the gateway broke: {error}") from error


def _parts(response: httpx2.Response) -> Generator[Part]:
    lines = AnswerLines()
    for line in response.iter_lines():
        yield from lines.read(line)
    if not lines.ended:
        raise TransientError("the answer ended before its end was told")
