"""The one way out: a JSON POST over https to a host that the operator has named, and that cannot be turned inward.

The name is resolved once, every address it has must be public, and the connection goes to an address that was checked,
with the certificate checked against the name. It uses no proxy, which would resolve the name itself. httpx's transport
without its client follows no redirect and keeps no cookie; nothing of the answer but its head is read.
"""

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import httpx

from foreshock.contract.route import RouteError, trusted_certificates, untrusted

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[list[str]]]

TOTAL_SECONDS: Final = 5.0
_NAME: Final = re.compile(r"(?=.{4,253}$)([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z][a-z0-9-]{0,61}[a-z0-9]")
_TARGET: Final = re.compile(r"/[A-Za-z0-9._~!$&'()*+,;=:@%/?-]*")
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")


class OutgoingError(Exception):
    """Nothing was delivered. The message never holds the URL, whose path is a secret."""


def is_public(address: Address) -> bool:
    """True for an address of the open internet; one that carries another address inside counts as not public."""
    if isinstance(address, ipaddress.IPv6Address):
        wraps = address.ipv4_mapped or address.sixtofour or address.teredo or address in _NAT64
        if wraps:
            return False
    return address.is_global and not address.is_multicast


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of a name."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


@dataclass(frozen=True)
class Target:
    """Where to send, taken apart."""

    host: str
    port: int
    path: str

    @classmethod
    def of(cls, url: str, allowed_hosts: Collection[str]) -> "Target":
        """Raises OutgoingError unless the URL is https, names an allowed host by name, and carries no login."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").lower(), parts.port or 443
        except ValueError:
            raise OutgoingError("the URL cannot be read") from None
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if parts.scheme != "https":
            raise OutgoingError("only https URLs are taken")
        if parts.username is not None or parts.password is not None or parts.fragment:
            raise OutgoingError("a URL with a login or a fragment is not taken")
        if not _NAME.fullmatch(host):
            raise OutgoingError("the URL must name a host by its full name, not by a number or a short name")
        if host not in allowed_hosts:
            raise OutgoingError(f"host {host} is not allowed; add it to FORESHOCK_NOTIFY_HOSTS to send there")
        if not _TARGET.fullmatch(path):
            raise OutgoingError("the URL's path holds characters that must be percent-encoded")
        return cls(host, port, path)


@dataclass(frozen=True)
class Outgoing:
    """Sends. Tests replace `resolve` and `reachable` to reach a server on loopback; nothing else does."""

    allowed_hosts: Collection[str]
    resolve: Resolve = resolve
    reachable: Callable[[Address], bool] = is_public
    tls: ssl.SSLContext | None = None
    """None: the certificates that the environment or the system names, read for each message."""
    total_seconds: float = TOTAL_SECONDS

    async def post(self, url: str, body: bytes) -> int:
        """Deliver a JSON body; the status of the answer. Raises OutgoingError when it was not delivered."""
        target = Target.of(url, self.allowed_hosts)
        try:
            async with asyncio.timeout(self.total_seconds):
                return await self._deliver(target, body)
        except TimeoutError:
            raise OutgoingError(f"{target.host} took longer than {self.total_seconds:g} s") from None
        except RouteError as error:
            raise OutgoingError(str(error)) from None
        except (OSError, httpx.HTTPError) as error:
            cause: BaseException = error
            while (earlier := cause.__cause__ or cause.__context__) is not None:  # of httpx's and httpcore's own
                cause = earlier
            raise OutgoingError(f"{target.host}: {type(cause).__name__}{untrusted(cause)}") from None

    async def _deliver(self, target: Target, body: bytes) -> int:
        addresses = [ipaddress.ip_address(text) for text in await self.resolve(target.host, target.port)]
        if not addresses or not all(self.reachable(address) for address in addresses):
            raise OutgoingError(f"{target.host} resolves to an address that is not public")
        url = httpx.URL(scheme="https", host=str(addresses[0]), port=target.port, raw_path=target.path.encode("ascii"))
        host = target.host if target.port == 443 else f"{target.host}:{target.port}"
        headers = {"host": host, "user-agent": "foreshock", "content-type": "application/json", "connection": "close"}
        request = httpx.Request(
            "POST", url, headers=headers, content=body, extensions={"sni_hostname": target.host, "timeout": {}}
        )
        tls = self.tls or trusted_certificates(ssl.create_default_context)
        async with httpx.AsyncHTTPTransport(verify=tls, trust_env=False) as connection:
            return (await connection.handle_async_request(request)).status_code
