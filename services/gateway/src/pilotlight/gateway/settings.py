"""The gateway's settings."""

import re
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path

from pydantic import Field, field_validator

from pilotlight.common.db.retention import PruneSettings
from pilotlight.common.messages.codec import MAX_PAYLOAD_BYTES
from pilotlight.common.model_roots import ModelRootsSettings
from pilotlight.common.settings import DatabaseSettings, PilotlightSettings, ServiceSettings

_ORIGIN = re.compile(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?")


class AccessSettings(PilotlightSettings):
    """Where the first keys come from."""

    admin_key_file: Path | None = Field(
        None,
        description="File with an admin key that must work. Replacing its content revokes the old key.",
    )
    api_key_file: Path | None = Field(
        None, description="File with an inference key that must work, likewise."
    )


class GatewaySettings(
    ServiceSettings, DatabaseSettings, PruneSettings, AccessSettings, ModelRootsSettings
):
    """Where it listens, what it holds, and for how long."""

    host: str = Field("127.0.0.1", description="Address on which the gateway serves HTTP.")
    port: int = Field(
        8000,
        ge=0,
        le=65535,
        description="Port on which the gateway serves HTTP; 0 takes a free one.",
    )
    share_port: bool = Field(
        default=False,
        description="Let other gateways of the same user on this machine listen on the same port.",
    )
    public_url: str = Field(
        "",
        description="URL at which clients reach this gateway, where it is not `http://host:port`.",
    )
    metrics_dir: Path | None = Field(
        None,
        description="Folder with the run folders of the services whose metrics `/metrics` shows too. By default the run folder: that is "
        "enough where one is shared by all.",
    )
    max_body_bytes: int = Field(
        MAX_PAYLOAD_BYTES,
        ge=1024,
        description="Longest body of an API request; more is refused with 413.",
    )
    bodies_bytes: int = Field(
        256 * 1024 * 1024,
        ge=1024 * 1024,
        description="Memory for the bodies of all API requests that arrive or are being decoded, with what is made of them; one key gets "
        "at most half. Beyond it 429.",
    )
    body_pause_s: float = Field(
        10.0, gt=0, description="How long no byte of a body may arrive before it ends with 408."
    )
    max_requests: int = Field(
        4096,
        ge=1,
        description="Answers that one gateway makes at a time, held ones included; an API request asks for one or more.",
    )
    max_choices: int = Field(
        16,
        ge=1,
        le=4096,
        description="Answers that one API request may ask for: `n` times the number of its prompts.",
    )
    max_held: int = Field(
        2048,
        ge=1,
        description="Requests that one gateway holds while models load; more are refused with 429.",
    )
    max_held_per_model: int = Field(
        512,
        ge=1,
        description="Requests that one gateway holds for one model; where more than that have their turn within a second, those, "
        "and in a line that has stood for seconds, as under overload, a tenth of those.",
    )
    request_timeout_s: float = Field(
        3600.0,
        gt=0,
        description="How long an API request may take in all; past it it ends with 503 or an error event, and its engine drops it.",
    )
    text_helpers: int = Field(
        0,
        ge=0,
        le=64,
        description="Prompts that are prepared at a time, each by a process of its own that may be lost; at least 2. 0: one for each core, "
        "3 to 8. There is always one process more, as a spare.",
    )
    text_helper_memory_bytes: int = Field(
        1024 * 1024 * 1024,
        ge=64 * 1024 * 1024,
        description="Memory that preparing one prompt, or reading one model's text files, may take; beyond it the request is refused.",
    )
    text_short_timeout_s: float = Field(
        5.0,
        gt=0,
        description="Processor time that preparing a prompt of at most 32 KiB may take; three times as long in all.",
    )
    text_timeout_s: float = Field(
        30.0,
        gt=0,
        description="Processor time that preparing a longer prompt, or reading a model's text files, may take; three times as long in all.",
    )
    text_queue_bytes: int = Field(
        128 * 1024 * 1024,
        ge=1024 * 1024,
        description="Bytes of prompts that wait to be prepared, of one key at most half; beyond them requests get 429.",
    )
    cors_origins: str = Field(
        "",
        description="Origins whose pages may call the API from a browser, separated by commas, for example `https://app.example.org`; "
        "`*` is any. The admin API and the dashboard are never shared.",
    )
    model_aliases: str = Field(
        "",
        description="Other names of models, as `alias=model`, separated by commas. A registered model goes before an alias.",
    )
    default_model: str = Field(
        "",
        description="Model, or alias, of requests that name none; without it they get 400.",
    )
    ollama_clients: str = Field(
        "",
        description="Addresses and networks, separated by commas, whose clients need no key for Ollama's API, for example `127.0.0.1`. "
        "Behind a proxy all clients have the proxy's address.",
    )
    metrics_clients: str = Field(
        "",
        description="Addresses and networks, likewise, that may read `/metrics`, which names every model; others get 403. By default all.",
    )
    hold_timeout_s: float = Field(
        120.0, gt=0, description="How long a request waits for an instance before it gets 503."
    )
    hold_slo_factor: float = Field(
        10.0,
        ge=0,
        description="A held request waits at least this many times its model's TTFT target.",
    )
    drain_s: float = Field(
        8.0, ge=0, description="How long streams may go on after the gateway is told to stop."
    )
    responses_keep_days: float = Field(
        30.0,
        gt=0,
        description="Days for which answers of the Responses API are kept, for clients that go on from them.",
    )
    responses_max_per_key: int = Field(
        10_000, ge=1, description="Such answers of one key that are kept at most, the newest."
    )
    responses_max_rows: int = Field(
        1_000_000, ge=0, description="Such answers of all keys, likewise; 0: no limit."
    )
    file_max_bytes: int = Field(
        64 * 1024 * 1024,
        ge=1024,
        description="Longest file that a client may upload; it takes twice as much of `bodies_bytes` while it arrives.",
    )
    files_max_per_key: int = Field(
        1000, ge=1, description="Files of one key that are kept; more are refused with 429."
    )
    files_keep_days: float = Field(
        30.0, gt=0, description="Days for which files and batches are kept."
    )
    batches_max_open_per_key: int = Field(
        100, ge=1, description="Batches of one key that have not ended; more are refused with 429."
    )
    batch_concurrency: int = Field(
        8,
        ge=1,
        description="Lines of batches that one gateway sends at a time, where clients leave room for them.",
    )
    usage_keep_days: float = Field(
        400.0, gt=0, description="Days for which usage is kept: what bills are made from."
    )
    usage_max_rows: int = Field(
        0, ge=0, description="Rows of usage that are kept at most, the newest; 0: no limit."
    )
    audit_keep_days: float = Field(400.0, gt=0, description="Days for which the audit log is kept.")
    audit_refused_max_rows: int = Field(
        100_000,
        ge=0,
        description="Refused attempts that the audit log keeps at most, the newest; what was done has no such limit.",
    )
    spans_keep_days: float = Field(
        1.0, gt=0, description="Days for which spans are kept for the trace viewer."
    )
    spans_max_rows: int = Field(
        1_000_000, ge=0, description="Spans that are kept at most, the newest; 0: no limit."
    )

    @field_validator("model_aliases")
    @classmethod
    def _are_aliases(cls, value: str) -> str:
        parsed_aliases(value)
        return value

    @field_validator("ollama_clients", "metrics_clients")
    @classmethod
    def _are_networks(cls, value: str) -> str:
        _networks(value)
        return value

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, value: str) -> str:
        for origin in parsed_list(value):
            if origin != "*" and _ORIGIN.fullmatch(origin) is None:
                raise ValueError(f"{origin!r} is no origin: https://host or https://host:port")
        return value

    @property
    def metrics_networks(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """Whose clients may read the metrics; none: all."""
        return _networks(self.metrics_clients)


def parsed_list(value: str) -> tuple[str, ...]:
    """The parts of a setting that has commas between them."""
    return tuple(part.strip() for part in value.split(",") if part.strip())


def parsed_aliases(value: str) -> dict[str, str]:
    """Aliases, with the models that they stand for.

    Raises:
        ValueError: it is no list of ``alias=model``.
    """
    aliases: dict[str, str] = {}
    for part in parsed_list(value):
        alias, equals, model = (piece.strip() for piece in part.partition("="))
        if not equals or not alias or not model or alias in aliases:
            raise ValueError(f"{part!r} is no alias=model, or its alias stands there twice")
        aliases[alias] = model
    return aliases


def _networks(value: str) -> tuple[IPv4Network | IPv6Network, ...]:
    return tuple(ip_network(part) for part in parsed_list(value))
