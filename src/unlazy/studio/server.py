"""The web server of the studio: the page, its data and live events, for a folder of runs. Reads runs, never writes them."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

from unlazy.runtime import InputError, UnlazyError, __version__, require
from unlazy.studio.answers import Answer, BadRequest, NotFound
from unlazy.studio.api import StudioApi
from unlazy.studio.bundle import CHART_STYLE, MEDIA_TYPES, page_files, script_hashes
from unlazy.studio.estimator_pages import estimator_page, list_page
from unlazy.studio.events import Watcher
from unlazy.studio.guard import EVERYWHERE, App, Guard, check_binding
from unlazy.studio.playground import Playground
from unlazy.studio.playground_child import PlaySettings
from unlazy.studio.run_index import RunIndex

MOST_POSTED = 4096  # bytes
REQUEST_SECONDS = 10  # within which a request must have arrived
FOR_EVER = "private, max-age=31536000, immutable"
log = logging.getLogger("unlazy.studio")


def require_server_packages() -> None:
    """Raise ``InputError`` if the packages of the extra ``unlazy[studio]`` are missing."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    names = " and ".join(missing)
    require(not missing, f"the studio needs {names}: install them with `pip install 'unlazy[studio]'`.")


def content_policy(page: str) -> str:
    """The content security policy: only scripts from the server may run, inline ones by their hash."""
    return "; ".join(
        [
            "default-src 'self'",
            " ".join(["script-src 'self'", *script_hashes(page)]),
            f"style-src 'self' {CHART_STYLE}",
            "img-src 'self' data: blob:",
            "connect-src 'self'",
            "object-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


class Studio:
    """The parts of the server: answers about runs, live events, and the playground."""

    def __init__(self, runs: str | Path, results: Path | None = None) -> None:
        self.playground = Playground()
        run_index = RunIndex(runs, self.playground.root)
        self.api, self.watcher = StudioApi(run_index, results), Watcher(run_index, self.playground.current_run)

    def close(self) -> None:
        """Stop the playground and end all event streams."""
        self.watcher.close()
        self.playground.close()


def make_app(studio: Studio, *, host: str = "127.0.0.1", token: str | None = None) -> App:
    """The web application, wrapped in its access control."""
    require_server_packages()
    from starlette.applications import Starlette
    from starlette.routing import Route

    static = page_files()
    page = static.get(
        "index.html", b"<!doctype html><title>unlazy</title><p>The page of the studio was not built."
    ).decode()

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        threading.Thread(target=_import_ahead, args=(studio.api.run_index,), daemon=True).start()
        try:
            yield
        finally:
            studio.close()

    routes = [
        Route("/api/events", partial(_serve_events, studio.watcher)),
        Route("/api/play", partial(_start_play, studio.playground), methods=["POST"]),
        Route("/api/play/ready", partial(_prepare_play, studio.playground), methods=["POST"]),
        Route("/api/play/stop", partial(_stop_play, studio.playground), methods=["POST"]),
        Route("/api/{rest:path}", partial(_serve_answer, studio.api)),
        Route("/estimators", partial(_serve_estimators, studio.api.run_index.root)),
        Route("/estimators/{name:path}", partial(_serve_estimators, studio.api.run_index.root)),
        Route("/{name:path}", partial(_serve_file, static | {"index.html": page.encode()})),
    ]
    app = Starlette(routes=routes, lifespan=lifespan)
    app.router.redirect_slashes = False  # an unknown address is a 404, never a redirect
    return Guard(app, host=host, token=token, policy=content_policy(page))


def _import_ahead(run_index: RunIndex) -> None:
    """Read the list of runs, then import what the first click needs, in the background."""
    run_index.cards()
    time.sleep(2)
    for name in ("torch", "matplotlib.figure"):
        import_module(name)


async def _serve_answer(api: StudioApi, request: Any) -> Any:
    """Answer an address below /api/: computed in a thread, with an ETag and cache headers."""
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import Response

    raw = request.scope.get("raw_path") or request.scope["path"].encode()
    segments = [unquote(part, errors="replace") for part in raw.decode("latin-1").split("?")[0].split("/")[2:]]
    try:
        answer: Answer = await run_in_threadpool(api.answer, segments, dict(request.query_params))
    except NotFound as error:
        return _error_response(404, str(error))
    except (BadRequest, UnlazyError) as error:
        return _error_response(400, str(error))
    except Exception as error:  # an unexpected run must not stop the server
        log.exception("could not answer %s", request.url.path)
        return _error_response(500, f"this could not be made: {error!r}")
    headers = dict(answer.headers) | {
        "ETag": answer.etag,
        "Cache-Control": FOR_EVER if answer.permanent else "no-cache",
    }
    if request.headers.get("if-none-match") == answer.etag:
        return Response(status_code=304, headers=headers)
    return Response(answer.body, media_type=answer.media, headers=headers)


async def _serve_file(static: dict[str, bytes], request: Any) -> Any:
    from starlette.responses import Response

    name = request.path_params["name"] or "index.html"
    if name not in static:
        return _error_response(404, f"there is nothing at /{name[:100]}.")
    return Response(static[name], media_type=MEDIA_TYPES[Path(name).suffix], headers={"Cache-Control": "no-cache"})


async def _serve_estimators(root: Path, request: Any) -> Any:
    """The page of one saved estimator, or the list of them."""
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import HTMLResponse

    name = request.path_params.get("name", "")
    try:
        if name:
            page = await run_in_threadpool(estimator_page, root, name, request.query_params.get("row"))
        else:
            page = await run_in_threadpool(list_page, root)
    except NotFound as error:
        return _error_response(404, str(error))
    except (BadRequest, UnlazyError) as error:
        return _error_response(400, str(error))
    return HTMLResponse(page, headers={"Cache-Control": "no-cache"})


async def _serve_events(watcher: Watcher, request: Any) -> Any:
    from starlette.responses import StreamingResponse

    if watcher.is_full():
        return _error_response(503, "too many pages listen already; close some.")
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(watcher.stream(__version__), media_type="text/event-stream", headers=headers)


async def _start_play(playground: Playground, request: Any) -> Any:
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse

    try:
        play = PlaySettings.from_json(await _read_settings(request))
        return JSONResponse({"key": await run_in_threadpool(playground.start, play)})
    except InputError as error:
        return _error_response(400, str(error))
    except UnlazyError as error:
        return _error_response(409, str(error))


async def _prepare_play(playground: Playground, request: Any) -> Any:
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse

    await run_in_threadpool(playground.prepare)
    return JSONResponse({"ready": True})


async def _stop_play(playground: Playground, request: Any) -> Any:
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse

    await run_in_threadpool(playground.stop)
    return JSONResponse({"stopped": True})


async def _read_settings(request: Any) -> Any:
    body = b""
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            async for chunk in request.stream():
                body += chunk
                require(len(body) <= MOST_POSTED, f"settings may hold {MOST_POSTED} bytes.")
        return json.loads(body)
    except TimeoutError as error:
        raise InputError(f"settings did not arrive within {REQUEST_SECONDS} seconds.") from error
    except ValueError as error:
        raise InputError(f"settings are not JSON ({error}).") from error


def _error_response(status: int, sentence: str) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse({"error": sentence}, status_code=status, headers={"Cache-Control": "no-store"})


# --- running it ----------------------------------------------------------------------------------


def listen(host: str, port: int) -> socket.socket:
    """Open a socket on the address; raises ``InputError`` with the reason if that fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
    )  # connections inherit it: small answers are not held back
    try:
        sock.bind((host, port))
        sock.listen(128)
    except (OSError, OverflowError) as error:
        sock.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot listen on {host}:{port} ({reason}); choose another --port, or 0 for any.") from error
    return sock


def address_of(host: str, sock: socket.socket, token: str | None) -> str:
    """The address to open in a browser."""
    name = "127.0.0.1" if host in EVERYWHERE else host
    shown = f"[{name}]" if ":" in name else name
    return f"http://{shown}:{sock.getsockname()[1]}/" + (f"?token={token}" if token else "")


def timed_protocol() -> type[asyncio.Protocol]:
    """uvicorn's protocol, with a limit: a connection whose request does not arrive in time is closed.

    uvicorn itself limits idle connections only, so that a visitor who sends a header a minute would hold one for ever.
    """
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class TimedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        """Starts a clock with the connection and with every further request; stops it while a request is answered."""

        clock: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            """Start the clock."""
            super().connection_made(transport)
            self.clock = self.loop.call_later(REQUEST_SECONDS, transport.close)

        def data_received(self, data: bytes) -> None:
            """Pass the data on; start the clock if a request has begun, stop it if its header has arrived."""
            super().data_received(data)
            answering = self.cycle is not None and not self.cycle.response_complete
            if self.clock is not None and answering:
                self.clock.cancel()
                self.clock = None
            elif self.clock is None and not answering:
                self.clock = self.loop.call_later(REQUEST_SECONDS, self.transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            """Stop the clock."""
            if self.clock is not None:
                self.clock.cancel()
            super().connection_lost(exc)

    return TimedProtocol


def serve(
    runs: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8123,
    token: str | None = None,
    results: Path | None = None,
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve until interrupted; calls ``ready(address)`` once the page can be opened."""
    require_server_packages()
    check_binding(host, token)
    require(runs.is_dir(), f"{runs} is not a folder; `unlazy reproduce circle` or a Scope writes runs.")
    import uvicorn
    from threadpoolctl import threadpool_limits

    sock, studio = listen(host, port), Studio(runs, results)

    class Server(uvicorn.Server):
        """A uvicorn server that ends all event streams when it shuts down."""

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            studio.watcher.close()  # an open page would keep the server alive
            await super().shutdown(sockets)

    config = uvicorn.Config(
        cast(Any, make_app(studio, host=host, token=token)),
        log_level="critical",  # errors in answers are logged here; a closed page is no error
        access_log=False,
        server_header=False,
        http=timed_protocol(),
        timeout_graceful_shutdown=2,
        lifespan="on",
        ws="none",
    )
    ready(address_of(host, sock, token))
    try:
        with threadpool_limits(1):  # many small products: several threads would be slower
            Server(config).run(sockets=[sock])
    finally:
        studio.close()
