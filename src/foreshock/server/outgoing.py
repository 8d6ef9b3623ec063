"""The service's only outgoing requests: a JSON POST over https to a host that the operator has allowed.

They cannot be directed at internal hosts: a name that resolves to an internal address has no valid certificate there,
and neither redirects nor a proxy of the environment are used. Only the head of the response is read.
"""

import asyncio
import ssl
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

import httpx

from foreshock.contract.route import RouteError, trusted_certificates, untrusted

TOTAL_SECONDS: Final = 5.0
_HEADERS: Final = {"user-agent": "foreshock", "content-type": "application/json"}


class OutgoingError(Exception):
    """The message was not delivered. The error text never contains the URL, because its path is a secret."""


def allowed(url: str, hosts: Collection[str]) -> httpx.URL:
    """Parse a URL to send to. Raises OutgoingError unless it is https, names one of these hosts, and has no login."""
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError):
        raise OutgoingError("the URL cannot be read") from None
    if parsed.scheme != "https":
        raise OutgoingError("only https URLs are allowed")
    if parsed.userinfo:
        raise OutgoingError("a URL with a login is not allowed")
    if parsed.host not in hosts:
        raise OutgoingError(f"host {parsed.host} is not allowed; add it to FORESHOCK_NOTIFY_HOSTS to send there")
    return parsed


@dataclass(frozen=True)
class Outgoing:
    """Sends messages. Only tests replace `transport`, to reach a server on loopback."""

    hosts: Collection[str]
    transport: Callable[[ssl.SSLContext], httpx.AsyncBaseTransport] = lambda tls: httpx.AsyncHTTPTransport(verify=tls)
    total_seconds: float = TOTAL_SECONDS

    async def post(self, url: str, body: bytes) -> int:
        """Deliver a JSON body; return the status of the response. Raises OutgoingError if there is none."""
        target = allowed(url, self.hosts)
        try:
            tls = trusted_certificates(ssl.create_default_context)  # read for each message, as the file may be renewed
            async with (
                asyncio.timeout(self.total_seconds),
                httpx.AsyncClient(transport=self.transport(tls), trust_env=False, timeout=self.total_seconds) as client,
                client.stream("POST", target, content=body, headers=_HEADERS) as answer,
            ):
                return answer.status_code
        except TimeoutError:
            raise OutgoingError(f"{target.host} took longer than {self.total_seconds:g} s") from None
        except RouteError as error:
            raise OutgoingError(str(error)) from None
        except (OSError, httpx.HTTPError) as error:
            cause: BaseException = error
            while (earlier := cause.__cause__ or cause.__context__) is not None:  # unwrap httpx and httpcore
                cause = earlier
            raise OutgoingError(f"{target.host}: {type(cause).__name__}{untrusted(cause)}") from None
