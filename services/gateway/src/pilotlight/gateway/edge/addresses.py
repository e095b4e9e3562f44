"""Whether a request comes from an address that a setting names."""

import ipaddress
from collections.abc import Iterable

from starlette.requests import Request

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def is_from(networks: Iterable[Network], request: Request) -> bool:
    """Whether its client is in one of them; one without an address is in none."""
    if request.client is None:
        return False
    try:
        address = ipaddress.ip_address(request.client.host)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    return any(address in network for network in networks)
