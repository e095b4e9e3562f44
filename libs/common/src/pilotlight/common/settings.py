"""Settings: environment variables named ``PILOTLIGHT_*``, checked at start, each with its meaning.

A service's own settings extend ``ServiceSettings`` in its ``settings.py``. ``docs/settings.md`` is
generated from the field descriptions; a test keeps it current. Secrets may be given as files:
``PILOTLIGHT_SECRETS_DIR`` holds one file per secret.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from pilotlight.common.errors import SettingsInvalid
from pilotlight.common.faults import Faults
from pilotlight.common.secret_files import read_secret
from pilotlight.policy.eviction.choice import POLICIES
from pilotlight.policy.eviction.tiers import DEFAULT

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

ENV_PREFIX = "PILOTLIGHT_"
MAX_SHOWN_CHARS = 100
_MAY_HOLD_SECRETS = ("url", "endpoint", "key", "password", "secret", "token")
"""In the name of a setting: its value is not shown."""


class PilotlightSettings(BaseSettings):
    """Base of all settings."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="ignore", frozen=True)

    def __init__(self, **values: Any) -> None:
        """Read the environment; ``values`` stand in its place.

        Raises:
            SettingsInvalid: some are wrong; the message has a line for each.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            told = "\n".join(_told(one) for one in error.errors(include_url=False))
            # Without the cause, whose text holds the values.
            raise SettingsInvalid(told) from None

    secrets_dir: Path | None = Field(
        default=None,
        description="Folder with one file per secret: `nats-gateway` (a NATS user's password), `postgres-gateway` (a database "
        "role's password), `cluster-key`, and so on.",
    )


class BusSettings(PilotlightSettings):
    """How to reach NATS."""

    nats_url: str = Field(
        default="nats://127.0.0.1:4222",
        description="URL of the NATS server; of several that are one cluster, with commas between them.",
    )
    prefix: str = Field(
        default="",
        description="Put before every subject and bucket: several systems on one server, as in tests.",
    )

    def password_of(self, user: str) -> str | None:
        """The NATS password of a service's user, or None where the server asks for none."""
        return read_secret(self.secrets_dir, f"nats-{user}")


class S3Settings(PilotlightSettings):
    """How to reach S3, for the object store and for models at `s3://bucket/prefix`.

    Credentials are the secrets `s3-access-key` and `s3-secret-key` (and `s3-session-token`), else
    what the environment gives in the usual names (AWS_ACCESS_KEY_ID and so on, or the machine's
    role).
    """

    s3_endpoint: str = Field(
        default="",
        description="URL of the S3 server, without a bucket: `https://s3.example.org`. Empty: AWS_ENDPOINT_URL, else Amazon's.",
    )
    s3_region: str = Field(
        default="",
        description="Region that requests are signed for. Empty: AWS_REGION, else `us-east-1`.",
    )
    s3_allow_http: bool = Field(
        default=False,
        description="Let the endpoint be `http://`: parameters and manifests then travel unprotected.",
    )
    s3_virtual_hosts: bool = Field(
        default=False,
        description="Put the bucket before the endpoint's host name instead of into the path.",
    )

    @field_validator("s3_endpoint")
    @classmethod
    def _is_an_endpoint(cls, value: str) -> str:
        return checked_endpoint(value) if value else value

    @model_validator(mode="after")
    def _plain_http_is_meant(self) -> Self:
        if self.s3_endpoint.startswith("http://") and not self.s3_allow_http:
            raise ValueError(
                f"PILOTLIGHT_S3_ENDPOINT is {self.s3_endpoint}: set PILOTLIGHT_S3_ALLOW_HTTP=true if it may travel unprotected"
            )
        return self


class ServiceSettings(BusSettings, S3Settings):
    """What every service needs."""

    run_dir: Path = Field(
        default=Path(".pilotlight/run"),
        description="Folder for Unix sockets: health, metrics, and the host pool's. A gateway keeps its journal of usage there, too.",
    )
    object_store_url: str = Field(
        default="file://.pilotlight/objects",
        description="Where manifests, text bundles and artifacts lie: `file:///folder` or `s3://bucket/prefix`.",
    )
    log_level: str = Field(default="info", description="`debug`, `info`, `warning` or `error`.")
    otlp_endpoint: str = Field(
        default="",
        description="OTLP/HTTP endpoint to which spans are also sent, for example `http://collector:4318`.",
    )
    trace_sample_ratio: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Share of requests that are traced; failures and cold starts always are.",
    )
    faults: str = Field(
        default="",
        description="For tests: delays at named points, for example `fetch=0.2,load=0.2`, in seconds.",
    )

    @field_validator("faults")
    @classmethod
    def _faults_are_known(cls, value: str) -> str:
        Faults.parse(value)
        return value


class DatabaseSettings(PilotlightSettings):
    """How to reach PostgreSQL.

    Only gateway, scheduler, cache and materializer have these, each with its own role.
    """

    database_url: str = Field(
        default="postgresql://127.0.0.1:5432/pilotlight",
        description="URL of the database. Without a user in it, a service takes its own role, `pilotlight_<service>`, with the "
        "password from the secret `postgres-<service>`.",
    )
    database_pool_size: int = Field(
        default=5,
        ge=1,
        le=100,
        description="Connections that one service process keeps at most, beside the one by which the scheduler and the cache write "
        "what cold starts wait for.",
    )
    database_prepares: bool = Field(
        default=True,
        description="Let the server keep prepared statements for a connection. False behind a pooler that gives each transaction "
        "another connection.",
    )


class EvictionSettings(PilotlightSettings):
    """What goes where there is no room: of the cache, which decides, and of the scheduler, which
    counts on it. Both need the same values.
    """

    eviction_policy: str = Field(
        default=DEFAULT,
        description="What stays on devices and in host pools: `pilotlight` (what a miss costs for each byte, times a forecast of how "
        "often it is asked for), `iam` (mCache's, without the forecast), or a rival: `lru`, `lfu`, `arc`, `srrip`, `gdsf`, "
        "`lhd`, `s3-fifo`, `idle-over-cost`, `ttl` (host copies go after 300 s without use), `iam-paper`, `iam-window`, `iam-ewma`.",
    )
    min_residency_s: float = Field(
        default=1.0, ge=0, description="A copy younger than this is not evicted."
    )

    @field_validator("eviction_policy")
    @classmethod
    def _policy_is_known(cls, value: str) -> str:
        if value not in POLICIES:
            raise ValueError(f"there is no policy {value!r}: one of {', '.join(POLICIES)}")
        return value


class LoadSettings(PilotlightSettings):
    """What an instance carries: of the scheduler, which starts more, and of the cache, which has
    copies where one may start. Both need the same value.
    """

    instance_requests: int = Field(
        16,
        ge=1,
        description="Waiting requests that one instance is expected to carry; more start another, up to `max_instances`.",
    )


def checked_endpoint(value: str) -> str:
    """The URL of a server, without a slash at its end.

    Raises:
        ValueError: it is no http or https URL, or it carries what has no place in one: credentials,
            a query.
    """
    parts = urlsplit(value)
    # Asking for the port checks it.
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError(
            f"{parts.scheme}://{parts.hostname or ''} is not the URL of a server: give https://host or https://host:port"
        )
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError(
            f"the URL of {parts.hostname} holds more than host, port and path: credentials belong into secrets"
        )
    return value.rstrip("/")


def _told(error: "ErrorDetails") -> str:
    """One wrong setting by the name that its operator knows, what is wrong, and the value where it
    can be no secret.
    """
    own = error.get("ctx", {}).get("error")
    if own is not None and not error["loc"]:
        return str(own)
    setting = ENV_PREFIX + "_".join(str(part) for part in error["loc"]).upper()
    if own is not None:
        # A check of ours says itself which value it means, and sometimes of which setting.
        return str(own) if setting in str(own) else f"{setting}: {own}"
    given = str(error["input"])
    if any(word in setting.lower() for word in _MAY_HOLD_SECRETS) or "://" in given:
        return f"{setting}: {error['msg']}"
    return f"{setting}: {error['msg']}, not {given[:MAX_SHOWN_CHARS]!r}"
