"""Who sends a request, and what they may do: those with a key, and others by their address."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Literal

from starlette.types import Scope

Permission = Literal["generate", "read", "metrics", "admin"]
# What a client may do of whom nothing else is said: not change what is served.
PERMISSIONS: tuple[Permission, ...] = ("generate", "read", "metrics")
# A household or a machine has this many bits of an IPv6 address to itself, at least.
IPV6_PREFIX = 64


@dataclass(frozen=True, kw_only=True)
class Client:
    """A client, the same one however many connections it has.

    Args:
        name: The name of its key, or its address.
        has_key: Whether it has a key.
        scopes: What it may do.
        priority: The lowest number, so the most urgent priority, that it may use.
        requests_per_minute: How many requests it may send.
        tokens_per_minute: How many tokens they may have, prompts and answers.
        max_running: How many of its generations run at the same time.
        max_waiting: How many of its generations wait.
    """

    name: str
    has_key: bool = False
    scopes: tuple[Permission, ...] = PERMISSIONS
    priority: int = 0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_running: int | None = None
    max_waiting: int | None = None


def address_of(scope: Scope) -> str:
    """Return the address that a request comes from, an IPv6 address as its network."""
    peer = scope.get("client")
    return network_of(peer[0]) if peer else ""


def network_of(host: str) -> str:
    """Return the network of an IPv6 address, an IPv4 address as it is, "unknown" for the rest."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return "unknown"  # a proxy's header may have anything
    if not isinstance(address, IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ip_network((address, IPV6_PREFIX), strict=False))
