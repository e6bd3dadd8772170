"""The server: the page, its data, and live events, over a folder of runs that it only reads."""

from __future__ import annotations

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
from unlazy.studio.answers import Answer, BadRequest, NotHere
from unlazy.studio.bundle import CHART_STYLE, MEDIA, bundle, script_hashes
from unlazy.studio.events import Watcher
from unlazy.studio.guard import EVERYWHERE, App, Guard, check_binding
from unlazy.studio.payload import Payload
from unlazy.studio.playground import Playground
from unlazy.studio.shelf import Shelf
from unlazy.studio.trainer import Play

MOST_POSTED = 4096  # bytes
FOR_EVER = "private, max-age=31536000, immutable"
log = logging.getLogger("unlazy.studio")


def need_server() -> None:
    """The studio's own packages are an extra; say so instead of a traceback."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    words = " and ".join(missing)
    require(not missing, f"the studio needs {words}: install them with `pip install 'unlazy[studio]'`.")


def content_policy(page: str) -> str:
    """Only what the server itself sends may run; inline scripts of the page count by their hash."""
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
    """What the server is made of: the runs, what is told of them, who listens, and the playground."""

    def __init__(self, runs: str | Path, results: Path | None = None) -> None:
        self.playground = Playground()
        shelf = Shelf(runs, self.playground.root)
        self.payload, self.watcher = Payload(shelf, results), Watcher(shelf, self.playground.playing)

    def close(self) -> None:
        """End the playground and let every listener go."""
        self.watcher.close()
        self.playground.close()


def make_app(studio: Studio, *, host: str = "127.0.0.1", token: str | None = None) -> App:
    """The whole application behind its guard."""
    need_server()
    from starlette.applications import Starlette
    from starlette.routing import Route

    static = bundle()
    page = static.get(
        "index.html", b"<!doctype html><title>unlazy</title><p>The page of the studio was not built."
    ).decode()

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        threading.Thread(target=_warm, args=(studio.payload.shelf,), daemon=True).start()
        try:
            yield
        finally:
            studio.close()

    routes = [
        Route("/api/events", partial(_events, studio.watcher)),
        Route("/api/play", partial(_play, studio.playground), methods=["POST"]),
        Route("/api/play/ready", partial(_ready, studio.playground), methods=["POST"]),
        Route("/api/play/stop", partial(_stop, studio.playground), methods=["POST"]),
        Route("/api/{rest:path}", partial(_answer, studio.payload)),
        Route("/{name:path}", partial(_static, static | {"index.html": page.encode()})),
    ]
    app = Starlette(routes=routes, lifespan=lifespan)
    app.router.redirect_slashes = False  # an address nobody serves is not here, wherever else it might lead
    return Guard(app, host=host, token=token, policy=content_policy(page))


def _warm(shelf: Shelf) -> None:
    """Read the list, then import what the first click needs, while nobody waits."""
    shelf.cards()
    time.sleep(2)
    for name in ("torch", "matplotlib.figure"):
        import_module(name)


async def _answer(payload: Payload, request: Any) -> Any:
    """Any address of data: computed in a thread, with an ETag, lasting where it may."""
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import Response

    raw = request.scope.get("raw_path") or request.scope["path"].encode()
    segments = [unquote(part, errors="replace") for part in raw.decode("latin-1").split("?")[0].split("/")[2:]]
    try:
        answer: Answer = await run_in_threadpool(payload.answer, segments, dict(request.query_params))
    except NotHere as error:
        return _problem(404, str(error))
    except (BadRequest, UnlazyError) as error:
        return _problem(400, str(error))
    except Exception as error:  # a run nobody foresaw must not take the page down
        log.exception("could not answer %s", request.url.path)
        return _problem(500, f"this could not be made: {error!r}")
    headers = dict(answer.headers) | {"ETag": answer.etag, "Cache-Control": FOR_EVER if answer.lasting else "no-cache"}
    if request.headers.get("if-none-match") == answer.etag:
        return Response(status_code=304, headers=headers)
    return Response(answer.body, media_type=answer.media, headers=headers)


async def _static(static: dict[str, bytes], request: Any) -> Any:
    from starlette.responses import Response

    name = request.path_params["name"] or "index.html"
    if name not in static:
        return _problem(404, f"there is nothing at /{name[:100]}.")
    return Response(static[name], media_type=MEDIA[Path(name).suffix], headers={"Cache-Control": "no-cache"})


async def _events(watcher: Watcher, request: Any) -> Any:
    from starlette.responses import StreamingResponse

    if watcher.is_full():
        return _problem(503, "too many pages listen already; close some.")
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(watcher.stream(__version__), media_type="text/event-stream", headers=headers)


async def _play(playground: Playground, request: Any) -> Any:
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse

    try:
        play = Play.from_json(await _posted(request))
        return JSONResponse({"key": await run_in_threadpool(playground.start, play)})
    except InputError as error:
        return _problem(400, str(error))
    except UnlazyError as error:
        return _problem(409, str(error))


async def _ready(playground: Playground, request: Any) -> Any:
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse

    await run_in_threadpool(playground.prepare)
    return JSONResponse({"ready": True})


async def _stop(playground: Playground, request: Any) -> Any:
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse

    await run_in_threadpool(playground.stop)
    return JSONResponse({"stopped": True})


async def _posted(request: Any) -> Any:
    body = b""
    async for chunk in request.stream():
        body += chunk
        require(len(body) <= MOST_POSTED, f"settings may hold {MOST_POSTED} bytes.")
    try:
        return json.loads(body)
    except ValueError as error:
        raise InputError(f"settings are not JSON ({error}).") from error


def _problem(status: int, sentence: str) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse({"error": sentence}, status_code=status, headers={"Cache-Control": "no-store"})


# --- running it ----------------------------------------------------------------------------------


def listen(host: str, port: int) -> socket.socket:
    """A socket on the address, or one clear line why not."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(128)
    except (OSError, OverflowError) as error:
        sock.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot listen on {host}:{port} ({reason}); choose another --port, or 0 for any.") from error
    return sock


def address_of(host: str, sock: socket.socket, token: str | None) -> str:
    """What to open in a browser."""
    name = "127.0.0.1" if host in EVERYWHERE else host
    shown = f"[{name}]" if ":" in name else name
    return f"http://{shown}:{sock.getsockname()[1]}/" + (f"?token={token}" if token else "")


def serve(
    runs: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8123,
    token: str | None = None,
    results: Path | None = None,
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve until interrupted; ``ready`` is told the address once it can be opened."""
    need_server()
    check_binding(host, token)
    require(runs.is_dir(), f"{runs} is not a folder; `unlazy reproduce circle` or a Scope makes runs to look at.")
    import uvicorn
    from threadpoolctl import threadpool_limits

    sock, studio = listen(host, port), Studio(runs, results)

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            studio.watcher.close()  # else every open page would hold the server
            await super().shutdown(sockets)

    config = uvicorn.Config(
        cast(Any, make_app(studio, host=host, token=token)),
        log_level="critical",  # what goes wrong in an answer is told by us; a page that leaves is no error
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
        lifespan="on",
        ws="none",
    )
    ready(address_of(host, sock, token))
    try:
        with threadpool_limits(1):  # many small products: threads would only wait for each other
            Server(config).run(sockets=[sock])
    finally:
        studio.close()
