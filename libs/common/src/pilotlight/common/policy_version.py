"""Which code decides: a name for it that changes when the code does."""

from functools import cache

from pilotlight.common.source_digest import release_of


@cache
def policy_version() -> str:
    """The release, and a digest of the sources of ``pilotlight.policy``: decisions of one version
    can be replayed by that version.
    """
    return release_of("policy")
