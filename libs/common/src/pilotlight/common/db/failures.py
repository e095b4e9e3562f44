"""What PostgreSQL means when it refuses: which error of ours tells the operator what to do.

A refused connection carries no SQLSTATE, only the server's words; those of the C locale are known
here.
"""

from pilotlight.common.errors import (
    DatabaseCrowded,
    DatabaseDenied,
    DatabaseFull,
    DatabaseUnavailable,
)

_BY_STATE: dict[str, type[DatabaseUnavailable]] = {
    "28000": DatabaseDenied,
    "28P01": DatabaseDenied,
    "53100": DatabaseFull,
    "53300": DatabaseCrowded,
}
_BY_WORDS: tuple[tuple[str, type[DatabaseUnavailable]], ...] = (
    ("authentication failed", DatabaseDenied),
    ("no password supplied", DatabaseDenied),
    ("pg_hba.conf", DatabaseDenied),
    ("is not permitted to log in", DatabaseDenied),
    ("too many clients", DatabaseCrowded),
    ("too many connections", DatabaseCrowded),
    ("remaining connection slots are reserved", DatabaseCrowded),
    ("no space left on device", DatabaseFull),
)


def database_error(what: str, error: BaseException | None) -> DatabaseUnavailable:
    """The error to raise for one of the driver's.

    Args:
        what: what was not possible, for example "the database failed".
        error: as the driver raised it.
    """
    told = " ".join(line.strip() for line in str(error).strip().splitlines()[:1]) or repr(error)
    return kind_of(str(error), getattr(error, "sqlstate", None))(f"{what}: {told}")


def kind_of(words: str, state: str | None) -> type[DatabaseUnavailable]:
    """Which error the server's words and its SQLSTATE, where there is one, stand for."""
    if state in _BY_STATE:
        return _BY_STATE[state]
    lowered = words.lower()
    if "role" in lowered and "does not exist" in lowered:
        return DatabaseDenied
    return next((kind for part, kind in _BY_WORDS if part in lowered), DatabaseUnavailable)
