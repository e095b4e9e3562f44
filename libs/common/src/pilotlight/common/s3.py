"""S3 clients: made from settings and secrets, never from what a URI says; and what a client's error
means.
"""

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from pilotlight.common.errors import SettingsInvalid
from pilotlight.common.secret_files import read_secret
from pilotlight.common.settings import S3Settings

if TYPE_CHECKING:  # they exist for type checkers alone
    from obstore.store import ClientConfig, S3Config

CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 600.0
"""For one request with its whole body: long, since a stall is what ``read_timeout_s`` finds."""

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_KIND = re.compile(r"kind: (Connect|Timeout|Interrupted|Decode|Request)\b")
_KINDS = {
    "Connect": "no connection can be made",
    "Timeout": "no answer in time",
    "Interrupted": "the connection broke",
    "Decode": "the answer cannot be decoded",
    "Request": "the request could not be sent",
}


def s3_store(
    settings: S3Settings,
    bucket: str,
    prefix: str = "",
    *,
    read_timeout_s: float = 30.0,
    retries: int = 4,
) -> S3Store:
    """A client of one bucket; nothing is sent yet.

    Args:
        settings: endpoint, region, and where the credentials lie.
        bucket: its name.
        prefix: put before every key.
        read_timeout_s: a connection that gives no byte for this long is given up.
        retries: of a request that failed in a way that may pass.

    Raises:
        SettingsInvalid: a secret cannot be read, or there is half of the credentials.
    """
    client: ClientConfig = {
        "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
        "read_timeout": timedelta(seconds=read_timeout_s),
        "timeout": timedelta(seconds=REQUEST_TIMEOUT_S),
    }
    if settings.s3_allow_http:
        client["allow_http"] = True
    config: S3Config = _credentials(settings)
    if settings.s3_endpoint:
        config["endpoint"] = settings.s3_endpoint
    if settings.s3_region:
        config["region"] = settings.s3_region
    if settings.s3_virtual_hosts:
        config["virtual_hosted_style_request"] = True
    try:
        return S3Store(
            bucket,
            prefix=prefix or None,
            config=config,
            client_options=client,
            retry_config={
                "max_retries": retries,
                "retry_timeout": timedelta(seconds=read_timeout_s),
            },
        )
    except (BaseError, ValueError) as error:
        raise SettingsInvalid(
            f"the S3 settings cannot be used: {_first_line(error)}; see PILOTLIGHT_S3_ENDPOINT"
        ) from error


@dataclass(frozen=True, slots=True)
class S3Fault:
    """What went wrong with a request."""

    status: int | None
    """Of the answer; None where there was none."""
    code: str
    """The server's own word for it, such as ``NoSuchBucket``; empty where it gave none."""
    text: str
    """A short sentence that names no credentials and no endpoint."""

    @property
    def denied(self) -> bool:
        """The credentials are wrong, or may not do this."""
        return self.status in (401, 403)

    @property
    def missing(self) -> bool:
        """The object is not there, or its bucket."""
        return self.status == 404

    @property
    def lasting(self) -> bool:
        """Trying again changes nothing: the request itself is what the server does not like."""
        return (
            self.status is not None and 300 <= self.status < 500 and self.status not in (408, 429)
        )

    @classmethod
    def of(cls, error: Exception) -> "S3Fault":
        """Read a client's error."""
        told = str(error)
        status_match, code_match = _STATUS.search(told), _CODE.search(told)
        status = int(status_match[1]) if status_match is not None else _status_of(error)
        code = code_match[1] if code_match is not None else ""
        if status is not None:
            return cls(status, code, f"the server answers {status}{f' {code}' if code else ''}")
        kind = _KIND.search(told)
        return cls(None, code, _KINDS[kind[1]] if kind is not None else _first_line(error))


def _status_of(error: Exception) -> int | None:
    known = (
        (PreconditionError, 412),
        (PermissionDeniedError, 403),
        (UnauthenticatedError, 401),
        (AlreadyExistsError, 409),
    )
    for kind, status in known:
        if isinstance(error, kind):
            return status
    return 404 if isinstance(error, FileNotFoundError) else None


def _credentials(settings: S3Settings) -> "S3Config":
    """Those of the secrets; what is not there is left to the environment."""
    try:
        access, secret, token = (
            read_secret(settings.secrets_dir, name)
            for name in ("s3-access-key", "s3-secret-key", "s3-session-token")
        )
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsInvalid(
            f"the S3 secrets in {settings.secrets_dir} cannot be read: {error}"
        ) from error
    config: S3Config = {}
    if access:
        config["access_key_id"] = access
    if secret:
        config["secret_access_key"] = secret
    if token:
        config["session_token"] = token
    return config


def _first_line(error: Exception) -> str:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line if len(line) <= 200 else f"{line[:197]}..."
