"""HTTP for reading from a hub: redirects are followed by hand, since each may lead to another
server.

A hub answers for large files with a redirect to where the bytes lie. Where that is, is foreign
input: our token does not travel there, and an address of our own network is not connected to unless
it is the hub's own or the settings name it.
"""

import ipaddress
import socket
import ssl
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

import httpcore2

from pilotlight.checkpoint.errors import SourceDenied, SourceUnavailable
from pilotlight.common.sources.ranged import Broken

MAX_REDIRECTS = 5
MAX_CONNECTIONS = 256
MAX_IDLE_CONNECTIONS = 16
CONNECT_TIMEOUT_S = 5.0
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
_USER_AGENT = "pilotlight"
_DRAINED_BYTES = 64 * 1024
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class _ForbiddenTarget(Exception):
    """A name stands for an address that may not be connected to."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A server."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> "Origin":
        """Of an absolute URL.

        Raises:
            ValueError: it is no http or https URL, or it carries credentials.
        """
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname or parts.username is not None:
            raise ValueError("not a plain http or https URL")
        return cls(parts.scheme, parts.hostname, parts.port or _PORTS[parts.scheme])


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer that stands at the end of the redirects, while its connection is open."""

    status: int
    headers: dict[str, str]
    """By name in lower case; the last of several."""
    endpoint_headers: dict[str, str]
    """What the endpoint itself said on the way; where it spoke more than once, what it said first.
    No other server's are in here."""
    url: str
    body: Iterator[bytes]

    def read(self, limit_bytes: int) -> bytes:
        """The whole body.

        Raises:
            SourceUnavailable: it is longer than this.
        """
        data = bytearray()
        for piece in self.body:
            data += piece
            if len(data) > limit_bytes:
                raise SourceUnavailable(f"the server's answer is longer than {limit_bytes} bytes")
        return bytes(data)


class GuardedHttp:
    """A client of one endpoint and of the places that it refers to. Threads may share it."""

    def __init__(
        self,
        endpoint: str,
        token: str | None,
        private_hosts: Iterable[str] = (),
        *,
        read_timeout_s: float = 10.0,
    ) -> None:
        """Nothing is sent yet.

        Args:
            endpoint: whose server is trusted wherever it is, and alone gets the token.
            token: for the endpoint.
            private_hosts: further servers, as ``host`` or ``host:port``, that may have private
                addresses.
            read_timeout_s: a connection that gives no byte for this long is given up.
        """
        self._endpoint = Origin.of(endpoint)
        self._authorization = f"Bearer {token}" if token else None
        guard = _Guard(self._endpoint, frozenset(private_hosts))
        self._pool = httpcore2.ConnectionPool(
            max_connections=MAX_CONNECTIONS,
            max_keepalive_connections=MAX_IDLE_CONNECTIONS,
            keepalive_expiry=30.0,
            network_backend=guard,
        )
        self._timeouts = {
            "connect": CONNECT_TIMEOUT_S,
            "read": read_timeout_s,
            "write": read_timeout_s,
            "pool": read_timeout_s,
        }

    @contextmanager
    def get(self, url: str, headers: dict[str, str] | None = None) -> Generator[Answer]:
        """GET, through redirects.

        Raises:
            Broken: no connection, no answer in time, or one that ended too soon.
            SourceDenied: a redirect leads to where nothing may be read.
            SourceUnavailable: redirects lead nowhere.
        """
        told: dict[str, str] = {}
        base, reference = url, ""
        for _ in range(MAX_REDIRECTS + 1):
            try:
                url = urljoin(base, reference)
                origin = Origin.of(url)
            except ValueError as error:
                raise SourceDenied(
                    "the server refers to a place that is not a plain http or https URL"
                ) from error
            if self._endpoint.scheme == "https" and origin.scheme != "https":
                raise SourceDenied(f"the server refers to {origin.host} without encryption")
            with self._request(url, origin, headers or {}) as response:
                answered = {
                    name.decode("latin-1").lower(): value.decode("latin-1")
                    for name, value in response.headers
                }
                if origin == self._endpoint:
                    told = {**answered, **told}
                if response.status not in _REDIRECTS:
                    yield Answer(response.status, answered, told, url, _pieces(response, origin))
                    return
                _drain(_pieces(response, origin))
            base, reference = url, answered.get("location", "")
        raise SourceUnavailable(f"more than {MAX_REDIRECTS} redirects")

    def close(self) -> None:
        """Close idle connections."""
        self._pool.close()

    @contextmanager
    def _request(
        self, url: str, origin: Origin, headers: dict[str, str]
    ) -> Generator[httpcore2.Response]:
        sent = {"accept-encoding": "identity", "user-agent": _USER_AGENT, **headers}
        if self._authorization is not None and origin == self._endpoint:
            sent["authorization"] = self._authorization
        with ExitStack() as stack:
            with _translated(origin):
                fields = [(name.encode(), value.encode()) for name, value in sent.items()]
                request = self._pool.stream(
                    "GET", url, headers=fields, extensions={"timeout": self._timeouts}
                )
                response = stack.enter_context(request)
            yield response


class _Guard(httpcore2.NetworkBackend):
    """Looks names up itself and connects to the very addresses that it looked at."""

    def __init__(self, endpoint: Origin, private_hosts: frozenset[str]) -> None:
        self._real = httpcore2.SyncBackend()
        self._trusted = {f"{endpoint.host}:{endpoint.port}", *private_hosts}

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.NetworkStream:
        """Connect, unless the name stands for an address of a private network."""

        def connect(address: str) -> httpcore2.NetworkStream:
            return self._real.connect_tcp(address, port, timeout, local_address, socket_options)

        if f"{host}:{port}" in self._trusted or host in self._trusted:
            return connect(host)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpcore2.ConnectError(f"{host} has no address") from error
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        if not all(is_public(address) for address in addresses):
            raise _ForbiddenTarget(host)
        return _first(addresses, connect)


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet, also where it wraps an older one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        wrapped = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in _NAT64:
            wrapped = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if wrapped is not None:
            return is_public(str(wrapped))
    return ip.is_global and not ip.is_multicast


def _first(
    addresses: list[str], connect: Callable[[str], httpcore2.NetworkStream]
) -> httpcore2.NetworkStream:
    """The connection to the first address that takes one."""
    for address in addresses[:-1]:
        try:
            return connect(address)
        except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
            continue
    return connect(addresses[-1])


def _pieces(response: httpcore2.Response, origin: Origin) -> Iterator[bytes]:
    with _translated(origin):
        yield from response.iter_stream()


def _drain(body: Iterator[bytes]) -> None:
    """Read what comes with a redirect, so that its connection can be used again."""
    read = 0
    for piece in body:
        read += len(piece)
        if read > _DRAINED_BYTES:
            return


@contextmanager
def _translated(origin: Origin) -> Generator[None]:
    try:
        yield
    except _ForbiddenTarget as error:
        raise SourceDenied(
            f"the server refers to {origin.host}:{origin.port}, which is in a private network; see PILOTLIGHT_HUB_PRIVATE_HOSTS"
        ) from error
    except httpcore2.ConnectTimeout as error:
        raise Broken(f"{origin.host} cannot be connected to in time") from error
    except httpcore2.TimeoutException as error:
        raise Broken(f"{origin.host} gives no answer in time") from error
    except (httpcore2.ConnectError, ssl.SSLError) as error:
        raise Broken(f"{origin.host}:{origin.port} cannot be connected to: {error}") from error
    except (httpcore2.LocalProtocolError, httpcore2.UnsupportedProtocol, ValueError) as error:
        raise SourceDenied(
            f"the server refers to a place that is no URL: {type(error).__name__}"
        ) from error
    except (httpcore2.NetworkError, httpcore2.ProtocolError) as error:
        raise Broken(f"the connection to {origin.host} broke") from error
