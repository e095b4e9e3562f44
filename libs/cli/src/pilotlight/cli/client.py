"""The admin API, as the commands use it."""

import json
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any

import httpx2

from pilotlight.cli.gateway_errors import gateway_error
from pilotlight.cli.home import Home
from pilotlight.common.errors import BadRequest, PilotlightError

DEADLINE_S = 60.0
"""Longer than the gateway takes for anything: registration reads headers for up to 30 s."""
SILENCE_S = 30.0
"""The stream of changes has a comment every 10 s."""


class SystemNotRunning(PilotlightError):
    """No Pilotlight system answers."""

    code = "system_not_running"
    status = 503
    action = "Start one with `pilotlight up`, or set PILOTLIGHT_URL and PILOTLIGHT_ADMIN_KEY to reach another."


class AdminClient:
    """Calls ``/admin/v1`` with the admin key; errors come back as the taxonomy's."""

    def __init__(self, url: str, key: str) -> None:
        """Nothing is sent yet.

        Raises:
            BadRequest: the URL or the key cannot be one.
        """
        try:
            self._http = httpx2.Client(
                base_url=url.rstrip("/") + "/admin/v1",
                headers={"Authorization": f"Bearer {key}"},
                timeout=DEADLINE_S,
            )
        except (httpx2.InvalidURL, UnicodeEncodeError) as error:
            raise BadRequest(
                f"PILOTLIGHT_URL or PILOTLIGHT_ADMIN_KEY is not valid: {error}"
            ) from error

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], home: Home) -> "AdminClient":
        """The system at PILOTLIGHT_URL, else the one that runs on the state folder.

        Raises:
            SystemNotRunning: neither is there.
        """
        url = environment.get("PILOTLIGHT_URL")
        key = environment.get("PILOTLIGHT_ADMIN_KEY")
        if url is None:
            running = home.running()
            if running is None:
                raise SystemNotRunning(f"no system runs on {home.root}")
            url = running.url
        if key is None:
            try:
                key = home.admin_key.read_text().strip()
            except OSError as error:
                raise SystemNotRunning(
                    f"cannot read the admin key {home.admin_key}: {error.strerror}"
                ) from error
        return cls(url, key)

    def __enter__(self) -> "AdminClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    @property
    def url(self) -> str:
        """Of the gateway."""
        return str(self._http.base_url).rstrip("/").removesuffix("/admin/v1")

    def get(self, path: str, **parameters: str | int) -> Any:
        """GET and return the decoded body."""
        return self._call("GET", path, params=parameters)

    def text(self, path: str, **parameters: str | int) -> str:
        """GET and return the body as it is."""
        return self._send("GET", path, params=parameters).text

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """POST and return the decoded body."""
        return self._call("POST", path, json=dict(body or {}))

    def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        """PATCH and return the decoded body."""
        return self._call("PATCH", path, json=dict(body))

    def put(self, path: str, body: Mapping[str, Any]) -> Any:
        """PUT and return the decoded body."""
        return self._call("PUT", path, json=dict(body))

    def delete(self, path: str) -> Any:
        """DELETE and return the decoded body, if there is one."""
        return self._call("DELETE", path)

    def follow(self, *topics: str) -> Generator[Mapping[str, Any] | None]:
        """Events of the stream of changes, without an end; None: nothing has changed for a while.

        Raises:
            SystemNotRunning: the gateway cannot be reached, or is gone.
            PilotlightError: it refuses.
        """
        patience = httpx2.Timeout(DEADLINE_S, read=SILENCE_S)
        try:
            with self._http.stream(
                "GET", "/stream", params={"topic": topics}, timeout=patience
            ) as response:
                if response.status_code >= 400:
                    response.read()
                    raise error_from(response)
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        yield json.loads(line.removeprefix("data: "))
                    elif line.startswith(":"):
                        yield None
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
            raise SystemNotRunning(f"the stream of {self._http.base_url} broke: {error}") from error
        raise SystemNotRunning(f"the stream of {self._http.base_url} ended")

    def rows(self, *topics: str) -> dict[str, list[Mapping[str, Any]]]:
        """What the stream of changes shows at the moment, by topic.

        Raises:
            PilotlightError: as ``follow``.
        """
        found: dict[str, list[Mapping[str, Any]]] = {topic: [] for topic in topics}
        left = set(topics)
        with closing(self.follow(*topics)) as events:
            for event in events:
                if event is None:
                    continue
                found[event["topic"]] += event["rows"]
                if not event["more"]:
                    left.discard(event["topic"])
                if not left:
                    break
        return found

    def _call(self, method: str, path: str, **arguments: Any) -> Any:
        response = self._send(method, path, **arguments)
        try:
            return response.json() if response.content else None
        except ValueError as error:
            raise SystemNotRunning(
                f"what answers at {self._http.base_url} is no Pilotlight: {response.text[:200]!r}"
            ) from error

    def _send(self, method: str, path: str, **arguments: Any) -> httpx2.Response:
        try:
            response = self._http.request(method, path, **arguments)
        except httpx2.TimeoutException as error:
            raise SystemNotRunning(
                f"no answer from {self._http.base_url} within {DEADLINE_S:g} s"
            ) from error
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise SystemNotRunning(f"cannot reach {self._http.base_url}: {error}") from error
        if response.status_code >= 400:
            raise error_from(response)
        return response


def error_from(response: httpx2.Response) -> PilotlightError:
    """What a gateway's answer with an error's status says."""
    try:
        error = response.json()["error"]
        return gateway_error(str(error["code"]), str(error["message"]))
    except (ValueError, KeyError, TypeError):
        return PilotlightError(
            f"the gateway answered {response.status_code}: {response.text[:200]}"
        )
