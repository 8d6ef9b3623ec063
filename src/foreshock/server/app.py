"""Builds the service's application and runs it."""

import asyncio
import errno
import gc
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import Final

import structlog
import uvicorn
from fastapi import FastAPI
from sqlalchemy.exc import SQLAlchemyError
from starlette.responses import HTMLResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

import foreshock
from foreshock.server import endpoint, problems
from foreshock.server.auth import AuthMiddleware, Keyring
from foreshock.server.commands import expire
from foreshock.server.endpoint import Endpoint, Writer
from foreshock.server.http import routes, stream, webhooks
from foreshock.server.http.exposition import Exposer
from foreshock.server.http.routes import Readiness
from foreshock.server.limits import Buckets, ConcurrencyLimit, Connection, raise_open_files
from foreshock.server.logs import Counters, configure_logs
from foreshock.server.notifier import Notifier
from foreshock.server.readings import ROLLING_SECONDS, Roller
from foreshock.server.runs.broadcast import Broadcaster
from foreshock.server.runs.current import SummaryCache
from foreshock.server.settings import Settings
from foreshock.server.store.database import Store, repeat, sole_service, unusable
from foreshock.server.store.retention import Retention
from foreshock.server.verification import verify

log = structlog.get_logger()
_CHORES_SECONDS: Final = 10.0
_CLOSING_SECONDS: Final = 5.0
_OBJECTS_PER_COLLECTION: Final = 20_000


def create_app(settings: Settings) -> FastAPI:
    """Return the service as an ASGI application. At startup it opens its store, and migrates it if set to do so."""
    store = Store(settings.database_url)
    counters = Counters()
    keyring = Keyring(settings, store)
    broadcaster = Broadcaster(store, settings)
    notifier = Notifier.of(store, settings)
    writer = Writer(settings, store, counters, broadcaster)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await _make_ready(store, settings)
        writing = asyncio.create_task(writer.run())
        closing = asyncio.Event()
        chores = partial(_chores, settings, store, broadcaster, Retention(store, settings.retention_seconds))
        rolling = partial(Roller(store).build_due, closing)
        running = (
            broadcaster.run(),
            repeat(rolling, "roll-ups could not be built", ROLLING_SECONDS, closing),
            repeat(chores, "a chore failed", _CHORES_SECONDS, closing),
        )
        others = [asyncio.create_task(one) for one in running]
        if notifier is not None:
            others.append(asyncio.create_task(notifier.run(closing)))
        try:
            yield
        finally:
            closing.set()
            broadcaster.close()
            writer.close()
            await writing
            finished, late = await asyncio.wait(others, timeout=_CLOSING_SECONDS)
            log.info("background tasks ended", ended=len(finished), cancelled=len(late))
            for task in late:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await store.close()

    app = FastAPI(
        title="foreshock",
        version=foreshock.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would use the Host header, which the client controls
    )
    app.state.settings, app.state.store, app.state.counters = settings, store, counters
    app.state.keyring, app.state.broadcaster, app.state.writer = keyring, broadcaster, writer
    app.state.readiness = Readiness(store, settings)
    app.state.known_runs = SummaryCache()
    app.state.exposer = Exposer(store, settings, counters, keyring)
    problems.install(app)
    batches = Endpoint(writer, counters, Buckets(settings.run_batches_per_second))
    for router in (endpoint.router, stream.router, webhooks.router, routes.router):
        app.router.routes.extend(router.routes)  # faster than include_router, which rebuilds every route
    _serve_page(app)
    shares = ConcurrencyLimit(settings.requests_at_once, settings.body_bytes_at_once, settings.max_body_bytes)
    app.add_middleware(
        AuthMiddleware, settings=settings, keyring=keyring, shares=shares, counters=counters, batches=batches
    )
    if proxies := list(settings.trusted_proxies):
        app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=proxies)
    return app


def _serve_page(app: FastAPI) -> None:
    """Add the page at / and its files under /assets; if the page is not built, the service has only the API."""
    dist = Path(str(files("foreshock.server") / "ui" / "dist"))
    if not (dist / "index.html").is_file():
        log.warning("the page is not built; the service offers only the API", looked_in=dist.name)
        return

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse((dist / "index.html").read_bytes(), headers={"cache-control": "no-cache"})

    if (dist / "assets").is_dir():
        app.mount("/assets", partial(_whole_file, StaticFiles(directory=dist / "assets")))


async def _whole_file(static: StaticFiles, scope: Scope, receive: Receive, send: Send) -> None:
    """Send a file whole. Starlette refuses a wrong Range header in plain text; errors here are problem+json."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"range"]
    await static({**scope, "headers": headers}, receive, send)


async def _chores(settings: Settings, store: Store, broadcaster: Broadcaster, retention: Retention) -> None:
    """Expire and verify commands and delete old runs."""
    await store.write(expire)
    await verify(store, settings)
    await retention.sweep()
    await store.give_back()
    broadcaster.wake()


async def _open_once(settings: Settings) -> None:
    """Open the store before the server starts, so that an unusable store is reported in one sentence."""
    store = Store(settings.database_url)
    try:
        await _make_ready(store, settings)
    except (OSError, SQLAlchemyError) as error:
        raise unusable(error, settings.database_url) from None
    finally:
        await store.close()


async def _make_ready(store: Store, settings: Settings) -> None:
    if store.sqlite if settings.migrate is None else settings.migrate:
        await store.migrate()
    await store.check_schema()


def serve(settings: Settings, ready: Callable[[str], None] = print) -> None:
    """Run the service until SIGINT or SIGTERM. `ready` gets a sentence with the page's address once it listens.

    Raises StoreError if the store cannot be used, AddressError if the service cannot listen at its address.
    """
    configure_logs()
    _check_address(settings.host, settings.port)
    with sole_service(settings.database_url):
        _serve(settings, ready)


def _serve(settings: Settings, ready: Callable[[str], None]) -> None:
    asyncio.run(_open_once(settings))
    config = uvicorn.Config(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=10,
        timeout_keep_alive=75,
        http=Connection,
    )
    server = Server(config, ready)
    _collect_rarely()
    raise_open_files()
    server.run()  # uvicorn chooses the event loop
    if not server.started:
        raise SystemExit(1)


def _collect_rarely() -> None:
    """Run the cyclic garbage collector rarely, and never on objects that exist already.

    At Python's defaults, collection takes some hundredths of a batch's time, though a batch's objects have no cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_PER_COLLECTION)


class AddressError(OSError):
    """The service cannot listen at the address of its settings."""


def _check_address(host: str, port: int) -> None:
    """Raise AddressError if the service cannot listen; uvicorn would only log the error and end the process."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((host, port), family=family):
            pass
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = "is used by another program" if taken else f"cannot be listened on ({error.strerror or error})"
        raise AddressError(
            f"port {port} of {host} {why}; set another address with --host and --port (FORESHOCK_HOST, "
            "FORESHOCK_PORT), 0 for a free port"
        ) from None


class Server(uvicorn.Server):
    """A uvicorn server that reports its address, and ends open streams and long reads at a signal to stop."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[str], None]) -> None:
        super().__init__(config)
        self._ready = ready
        self.address = ""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down cleanly on SIGTERM or SIGINT, with exit status 0; at once on the second signal."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then call `ready` with the address."""
        await super().startup(sockets)
        if self.started and self.servers:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            self._ready(f"foreshock is listening on {self.address}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """First end the streams, which would stay open, and cancel reads in progress."""
        app = self.config.app
        if isinstance(app, FastAPI):
            app.state.broadcaster.close()
            app.state.store.cancel_reads()
        await super().shutdown(sockets)
