"""Where the servers of the bus are, by a process's settings."""

from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from pilotlight.common.settings import BusSettings


@dataclass(frozen=True, slots=True)
class NatsServers:
    """Where to connect, and as which user. The URL holds no password: it stands in messages."""

    urls: tuple[str, ...]
    user: str | None
    password: str | None

    @property
    def url(self) -> str:
        """For messages."""
        return ",".join(self.urls)

    def named(self, user: str, settings: BusSettings) -> str:
        """As whom a process connects, for messages.

        Args:
            user: Who it is among ours.
            settings: Its own.
        """
        if self.user not in (user, None):
            return f"as {self.user}, whom PILOTLIGHT_NATS_URL names"
        if settings.password_of(user):
            return f"as {user} with the password of nats-{user}"
        return f"as {user} without a password"


def servers_of(settings: BusSettings, user: str) -> NatsServers:
    """Credentials in the URL are an operator's own and go first: a server that was not set up by us
    does not know our users.

    Several URLs are those of one cluster; the first one's credentials are for all.
    """
    urls = [one.strip() for one in settings.nats_url.split(",")]
    parts = [urlsplit(one) for one in urls]
    if parts[0].username:
        bare = [one._replace(netloc=one.netloc.rpartition("@")[2]).geturl() for one in parts]
        return NatsServers(
            tuple(bare), unquote(parts[0].username), unquote(parts[0].password or "")
        )
    password = settings.password_of(user)
    return NatsServers(tuple(urls), user if password else None, password)
