"""The live page: what runs now, told to every browser that looks by server-sent events, and a button that ends a
machine with proof.

On loopback the page is open to whoever is on this machine, and to nobody's web page: a request must name a loopback
host (no other name can be made to mean it) and come from no other page, and a stop must carry a secret that only this
page was given. On any other address every request needs a token besides.
"""

import asyncio
import hmac
import json
import secrets
import socket
import threading
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from hotlap import clock
from hotlap.report.page import templates

Sections = Callable[[], dict[str, Any]]
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_EVERY_S = 1.0
_COOKIE = "hotlap_dashboard"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Stops:
    """Machines that are being ended, or were: a run, and what came of it."""

    def __init__(self, end: Callable[[str, Callable[[str], None]], str]) -> None:
        """`end` ends what is rented for a run and returns the proof in words; it raises when there is none."""
        self._end = end
        self._turn = threading.Lock()
        self._told: dict[str, dict[str, str]] = {}

    def begin(self, run: str) -> bool:
        """False: it is being ended already."""
        with self._turn:
            if self._told.get(run, {}).get("state") == "ending":
                return False
            self._told[run] = {"run": run, "state": "ending", "text": "asked to end; waiting for the proof"}
        threading.Thread(target=self._run, args=(run,), daemon=True).start()
        return True

    def _run(self, run: str) -> None:
        try:
            state, text = "proven", self._end(run, lambda text: self._tell(run, "ending", text))
        except Exception as error:  # noqa: BLE001  (whatever it was, whoever pressed the button must learn of it)
            state, text = "failed", f"{type(error).__name__}: {error}"
        self._tell(run, state, text)

    def _tell(self, run: str, state: str, text: str) -> None:
        with self._turn:
            self._told[run] = {"run": run, "state": state, "text": text}

    def section(self) -> list[dict[str, str]]:
        with self._turn:
            return list(self._told.values())


class Gate:
    """Lets in who may come in. See the module."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = self._refusal(Request(scope))
            if refusal is not None:
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, request: Request) -> Response | None:
        if not _is_asked_here(request):
            return _no(403, "This dashboard answers no other page.")
        if self._token is None:
            is_loopback = _host_of(request) in LOOPBACK
            return None if is_loopback else _no(403, "This dashboard answers to 127.0.0.1 and localhost only.")
        if hmac.compare_digest(request.cookies.get(_COOKIE, "").encode(), self._token.encode()):
            return None
        if hmac.compare_digest(request.query_params.get("token", "").encode(), self._token.encode()):
            # Out of the address at once, so that it stays in no history and no screenshot.
            welcome = RedirectResponse("/", 303, headers=_HEADERS)
            welcome.set_cookie(_COOKIE, self._token, httponly=True, samesite="strict")
            return welcome
        return _no(401, "Open the address that hotlap dashboard printed; it ends in a token.")


def _host_of(request: Request) -> str | None:
    """The name that the browser was told to go to, without its port; None for what is no name."""
    try:
        return urlsplit(f"//{request.headers.get('host', '')}").hostname
    except ValueError:
        return None


def _is_asked_here(request: Request) -> bool:
    """Whether our own page asks, or a person who typed the address or followed a link to it, or no browser at all."""
    headers = request.headers
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
    is_visit = request.method == "GET" and headers.get("sec-fetch-mode") == "navigate"
    is_own = origin is None or origin.partition("://")[2] == headers.get("host")
    return is_own and (site in ("none", "same-origin") or is_visit)


def _no(code: int, text: str) -> Response:
    return PlainTextResponse(f"{text}\n", code, headers=_HEADERS)


def make_app(sections: Sections, stops: Stops, token: str | None = None) -> Starlette:
    """`sections` are JSON values by name, made in a thread; `token` is asked for when it is given."""
    secret = secrets.token_urlsafe(16)
    environment = templates()

    def everything() -> dict[str, Any]:
        return {**sections(), "stops": stops.section()}

    def page(_: Request) -> Response:
        html = environment.get_template("dashboard.html").render(secret=secret)
        return Response(html, media_type="text/html", headers=_HEADERS)

    def file(request: Request) -> Response:
        name = request.url.path.removeprefix("/")
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        return Response((Path(__file__).parent / "templates" / name).read_bytes(), media_type=kind, headers=_HEADERS)

    async def state(_: Request) -> Response:
        return JSONResponse(await run_in_threadpool(everything), headers=_HEADERS)

    async def events(_: Request) -> Response:
        return StreamingResponse(_changes(everything), media_type="text/event-stream", headers=_HEADERS)

    async def stop(request: Request) -> Response:
        given = request.headers.get("x-hotlap-secret", "")
        if not hmac.compare_digest(given.encode(), secret.encode()):
            return _no(403, "Only this page's own button ends machines.")
        try:
            run = (await request.json())["run"]
        except (ValueError, KeyError, TypeError):
            return _no(400, 'The body is {"run": NAME}.')
        may_stop = {row["run"] for row in (await run_in_threadpool(everything))["machines"] if row["may_stop"]}
        if not isinstance(run, str) or run not in may_stop:
            return _no(404, "Nothing is rented for a run of this name.")
        return JSONResponse({"begun": stops.begin(run)}, 202, headers=_HEADERS)

    routes = [
        Route("/", page),
        *(Route(f"/{name}", file) for name in ("style.css", "dashboard.css", "dashboard.js")),
        Route("/state", state),
        Route("/events", events),
        Route("/stop", stop, methods=["POST"]),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Gate, token=token)])


async def _changes(everything: Sections) -> AsyncGenerator[str]:
    """A message a second: the sections that are not as they were, and the server's time, by which others count."""
    told: dict[str, str] = {}
    while True:
        made = await run_in_threadpool(everything)
        texts = {name: json.dumps(value) for name, value in made.items()}
        news = {name: made[name] for name, text in texts.items() if told.get(name) != text}
        told = texts
        yield f"data: {json.dumps({'now_s': clock.wall_s(), **news})}\n\n"
        await asyncio.sleep(_EVERY_S)


# --- serving ---


def listen(host: str, port: int) -> socket.socket:
    """
    Raises:
        OSError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


def serve(app: Starlette, listener: socket.socket) -> None:
    """Until Ctrl-C."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1, lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])
