"""Access control of the studio: only its own page on this machine, or requests with the token, are answered.

Every page that is open in a browser can reach a server on the loopback address. Therefore foreign host names (DNS rebinding),
requests from other sites, and methods that change something are refused before anything is read.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

from unlazy.runtime import require

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
EVERYWHERE = frozenset({"0.0.0.0", "::"})
COOKIE = "unlazy_token"
POSTS = frozenset({"/api/play", "/api/play/ready", "/api/play/stop"})


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    return host.lower() in LOOPBACK


def check_binding(host: str, token: str | None) -> None:
    """Raise ``InputError`` if other machines could connect without a token, or if the token is too short."""
    require(
        is_loopback(host) or token is not None,
        f"--host {host} lets other machines read these runs; give --token as well, or leave --host out.",
    )
    require(token is None or len(token) >= 8, "a token needs at least 8 characters.")
    require(token is None or token.isascii(), "a token may hold ASCII characters only.")


class Guard:
    """Wraps an application: refuses requests that are not allowed, and adds security headers to every answer."""

    def __init__(self, app: App, *, host: str, token: str | None, policy: str) -> None:
        check_binding(host, token)
        self.app, self.token = app, token
        self.hosts = None if host in EVERYWHERE else LOOPBACK | {host.lower()}
        self.headers = {
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "x-frame-options": "DENY",
            "referrer-policy": "no-referrer",
            "cross-origin-resource-policy": "same-origin",
            "cross-origin-opener-policy": "same-origin",
            "permissions-policy": "camera=(), microphone=(), geolocation=()",
        }

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return  # no websockets here

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                ours = [(name.encode(), value.encode()) for name, value in self.headers.items()]
                message = {**message, "headers": [*message.get("headers", []), *ours]}
            await send(message)

        headers = _headers(scope)
        refused = self._refusal(scope, headers)
        if refused is not None:
            await _reply(send_with_headers, *refused)
        elif self.token is not None and not self._has_token(headers):
            await self._ask_for_token(scope, send_with_headers)
        else:
            await self.app(scope, receive, send_with_headers)

    def _refusal(self, scope: Message, headers: dict[str, list[str]]) -> tuple[int, str] | None:
        """Status and reason, or ``None`` if the request may pass."""
        method, path = scope["method"], scope["path"]
        hosts = headers.get("host", [])
        if len(hosts) != 1 or (self.hosts is not None and host_name(hosts[0]) not in self.hosts):
            return 403, "this studio answers to its own address only."
        allowed = ("POST",) if path in POSTS else ("GET", "HEAD")
        if method not in allowed:
            return 405, f"only {' and '.join(allowed)} here."
        origins = headers.get("origin", [])
        own = (f"http://{hosts[0]}", f"https://{hosts[0]}")
        if len(origins) > 1 or (origins and origins[0] not in own):
            return 403, "requests from other sites are refused."
        site, mode = headers.get("sec-fetch-site", ["none"]), headers.get("sec-fetch-mode", [""])
        followed = path == "/" and mode == ["navigate"]  # a link to the page itself, which contains no data
        if site not in (["same-origin"], ["none"]) and not followed:
            return 403, "requests from other sites are refused."
        if method == "POST" and (not origins or headers.get("x-unlazy") != ["1"]):
            return 403, "a change must come from the page itself (Origin and X-Unlazy: 1)."
        return None

    def _has_token(self, headers: dict[str, list[str]]) -> bool:
        offered = [value.removeprefix("Bearer ") for value in headers.get("authorization", [])]
        for value in headers.get("cookie", []):
            try:
                jar = SimpleCookie(value)
            except CookieError:
                continue
            offered += [jar[COOKIE].value] if COOKIE in jar else []
        return any(self._is_token(value) for value in offered)

    def _is_token(self, value: str) -> bool:
        return self.token is not None and secrets.compare_digest(value.encode(), self.token.encode())

    async def _ask_for_token(self, scope: Message, send: Send) -> None:
        asked = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [])
        if scope["path"] == "/" and scope["method"] == "GET" and len(asked) == 1 and self._is_token(asked[0]):
            jar = SimpleCookie({COOKIE: self.token or ""})
            cookie = f"{jar[COOKIE].OutputString()}; Path=/; HttpOnly; SameSite=Strict"
            await _reply(send, 303, "welcome.", {"location": "/", "set-cookie": cookie})
        else:
            await _reply(send, 401, "this studio needs its token: open the address that `unlazy studio` printed.")


def host_name(value: str) -> str:
    """The name in a Host header, without its port; empty if the header is malformed."""
    value = value.strip().lower()
    if value.startswith("["):
        name, closed, rest = value[1:].partition("]")
        return name if closed and (not rest or _is_port(rest)) else ""
    name, colon, port = value.partition(":")
    return name if not colon or _is_port(colon + port) else ""


def _is_port(text: str) -> bool:
    return text[:1] == ":" and text[1:].isascii() and text[1:].isdigit()


def _headers(scope: Message) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    return found


async def _reply(send: Send, status: int, reason: str, headers: dict[str, str] | None = None) -> None:
    body = json.dumps({"error": reason}).encode()
    plain = {"content-type": "application/json", "content-length": str(len(body)), "cache-control": "no-store"}
    encoded = [(name.encode(), value.encode()) for name, value in (plain | (headers or {})).items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
