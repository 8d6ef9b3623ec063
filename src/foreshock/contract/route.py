"""The route of an HTTP request as set by environment variables: its proxy, and the trusted certificates.

httpx reads the same variables, but it fails on some usual values (`NO_PROXY=[::1]`), does not name the variables in its
errors, and sends requests to a loopback address through the proxy.
"""

import ipaddress
import os
import re
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import httpx

_CERTIFICATES: Final = ("SSL_CERT_FILE", "SSL_CERT_DIR")


class RouteError(OSError):
    """An environment variable has an unusable value. The message names the variable, but contains no secret."""


@dataclass(frozen=True)
class Route:
    """How to reach one address. str() names the proxy and its variable; it is empty without a proxy."""

    proxy: httpx.Proxy | None
    variable: str
    """The variable that named the proxy."""
    tls: ssl.SSLContext | bool
    """False if neither the address nor the proxy uses TLS."""

    def __str__(self) -> str:
        if self.proxy is None:
            return ""
        where = self.proxy.url  # without the login, which httpx.Proxy removes
        return f" through the proxy {where.scheme}://{where.netloc.decode('ascii')} ({self.variable})"


def route_to(url: str) -> Route:
    """Return the route to `url`. Raises RouteError if a variable that this route needs is unusable."""
    route = _route(url)
    proxy, tls_to_proxy = route.proxy, route.proxy is not None and route.proxy.url.scheme == "https"
    if not tls_to_proxy and httpx.URL(url).scheme != "https":
        return route
    tls = trusted_certificates()
    if proxy is not None and tls_to_proxy:
        proxy = httpx.Proxy(proxy.url, ssl_context=tls, auth=proxy.auth)
    return Route(proxy, route.variable, tls)


def _route(url: str) -> Route:
    """Return the route without reading certificates, which is slow."""
    variable, value = _proxy_of(httpx.URL(url))
    return Route(_proxy(variable, value) if value else None, variable, False)


def transport_to(url: str) -> httpx.HTTPTransport:
    """Return an httpx transport for the route to `url`. Raises RouteError."""
    route = route_to(url)
    return httpx.HTTPTransport(verify=route.tls, proxy=route.proxy, trust_env=False)


def unanswered(url: str, error: BaseException) -> str:
    """Return the address that did not answer, the proxy that was used, and the error, for an error message."""
    return f"{url}{through(url)} ({type(error).__name__}{untrusted(error)})"


def through(url: str) -> str:
    """Return the proxy of requests to `url`, in words to follow the address; empty without a usable proxy."""
    try:
        return str(_route(url))
    except RouteError:
        return ""


def untrusted(error: BaseException) -> str:
    """Return a clause that names the variable of the trusted certificates if verification failed, else empty."""
    name = next((name for name in _CERTIFICATES if os.environ.get(name)), "")
    return f"; the trusted certificates are those of {name}" if name and "CERTIFICATE_VERIFY" in str(error) else ""


def _of_httpx() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)


def trusted_certificates(default: Callable[[], ssl.SSLContext] = _of_httpx) -> ssl.SSLContext:
    """Load the certificates of SSL_CERT_FILE, else of SSL_CERT_DIR, else the defaults of httpx. Raises RouteError."""
    file, folder = os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")
    try:
        if file:
            if not Path(file).is_file():  # reading a pipe would block
                raise FileNotFoundError("there is no such regular file")
            return ssl.create_default_context(cafile=file)
        if folder:
            if not any(Path(part).is_dir() and os.access(part, os.R_OK) for part in folder.split(os.pathsep)):
                raise FileNotFoundError("there is no such readable folder")
            return ssl.create_default_context(capath=folder)
        return default()
    except (OSError, ValueError) as error:
        read = ("SSL_CERT_FILE" if file else "SSL_CERT_DIR", "SSLKEYLOGFILE", "OPENSSL_CONF")
        named = " or ".join(f"{name}={os.environ[name]}" for name in read if os.environ.get(name))
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RouteError(f"{named} cannot be used for TLS: {why}") from None


def is_loopback(host: str) -> bool:
    """Whether a name or an address refers to this machine."""
    bare = host.strip("[]").rstrip(".").lower()
    if bare == "localhost" or bare.endswith(".localhost"):
        return True
    address = _ip(bare)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address is not None and (address.is_loopback or address.is_unspecified)


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        pass
    try:
        return ipaddress.IPv4Address(socket.inet_aton(text)) if re.fullmatch(r"[0-9a-fx.]+", text) else None
    except OSError:  # inet_aton also accepts addresses such as 127.1 and 2130706433
        return None


def _proxy_of(address: httpx.URL) -> tuple[str, str]:
    """Return (variable, value) of the proxy; two empty strings without one, also if the variable is set but empty."""
    if is_loopback(address.host) or _is_excepted(address):
        return "", ""
    for kind in (address.scheme, "all"):
        for name in (f"{kind}_proxy", f"{kind}_proxy".upper()):
            if name in os.environ:
                if os.environ[name].strip():
                    return name, os.environ[name].strip()
                break
    return "", ""


def _proxy(variable: str, value: str) -> httpx.Proxy:
    try:
        proxy = httpx.Proxy(value if "://" in value else f"http://{value}")
        if not proxy.url.host:
            raise ValueError
    except (ValueError, httpx.InvalidURL):
        raise RouteError(f"{variable} is not the address of a proxy; write it like http://HOST:PORT") from None
    if proxy.url.scheme.startswith("socks") and find_spec("socksio") is None:
        raise RouteError(f"{variable} names a SOCKS proxy, which needs socksio: pip install 'httpx[socks]'")
    return proxy


def _is_excepted(address: httpx.URL) -> bool:
    """Whether NO_PROXY names the host: by name, by a domain above it, by address, by network, or by *."""
    host, own = address.host.rstrip(".").lower(), _ip(address.host)
    port = address.port or {"http": 80, "https": 443}.get(address.scheme)
    for entry in re.split(r"[,\s]+", os.environ.get("no_proxy", os.environ.get("NO_PROXY", "")).lower()):
        name = entry.partition("://")[2] or entry
        if match := re.fullmatch(r"(\[.*\]|[^:]*):(\d+)", name):
            if int(match[2]) != port:
                continue
            name = match[1]
        name = name.replace("[", "").replace("]", "").lstrip("*").strip(".")
        if entry == "*" or (name and (host == name or host.endswith(f".{name}"))):
            return True
        with suppress(ValueError):  # a name, not a network
            if own is not None and own in ipaddress.ip_network(name, strict=False):
                return True
    return False
