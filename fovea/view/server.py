"""The server of `fovea view`, which listens on the loopback address only."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import uvicorn
from starlette.applications import Starlette
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from fovea.report.images import read_image
from fovea.report.page_files import PAGE_FILES, media_type, page_file
from fovea.report.viewed_run import ViewedRun
from fovea_gym.errors import ConfigError, FoveaError

Endpoint: TypeAlias = Callable[[Request], Response]
HOSTS = ("127.0.0.1", "localhost")
"""Accepted Host headers. A foreign site that resolves its own name to this machine (DNS rebinding) sends that name."""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}


class _Number(IntegerConvertor):
    """Matches numbers in a path, with at most 15 digits: Python refuses to parse thousands of digits."""

    regex = "[0-9]{1,15}"


register_url_convertor("number", _Number())


OF_A_RUN: Mapping[str, Callable[[ViewedRun, int], Any]] = {
    "curve": ViewedRun.curve,
    "totals": ViewedRun.totals,
    "step": ViewedRun.step,
    "answers": ViewedRun.answers,
    "about": lambda run, _: run.settings_and_console(),
    "summary": lambda run, _: run.summary(),
}
"""Replies about one run, by the first word of their path; the run's number and another number follow in the path."""


def make_app(runs: Sequence[ViewedRun]) -> Starlette:
    """Create the application that shows these runs."""
    return secured(run_routes(runs))


def secured(routes: Sequence[BaseRoute]) -> Starlette:
    """Create an application that accepts requests to HOSTS only and sets HEADERS on every response."""
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(_SetHeaders),
            Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False),
        ],
        exception_handlers={HTTPException: _as_json, FoveaError: _as_json},
    )


def run_routes(runs: Sequence[ViewedRun]) -> list[BaseRoute]:
    """Routes for the page of these runs and for the data that it requests."""

    def run_of(request: Request) -> ViewedRun:
        number: int = request.path_params["run"]
        if number >= len(runs):
            raise HTTPException(404, f"no run {number}: there are {len(runs)}")
        return runs[number]

    def facts(_request: Request) -> Response:
        for run in runs:
            run.refresh()
        return _json([run.facts() for run in runs])

    def of_a_run(name: str) -> Route:
        def answer(request: Request) -> Response:
            return _json(OF_A_RUN[name](run_of(request), request.path_params["number"]))

        return Route(f"/data/{name}/{{run:number}}/{{number:number}}", _found(answer))

    def entries(request: Request) -> Response:
        return _json_text(run_of(request).entries(request.path_params["after"]))

    def image(request: Request) -> Response:
        png = read_image(run_of(request).folder, request.path_params["name"])
        if png is None:
            raise HTTPException(404, "this image was deleted from samples/images")
        return Response(png, media_type="image/png")

    return [
        Route("/", lambda _request: page("index.html")),
        Route("/data/runs", facts),
        *map(of_a_run, OF_A_RUN),
        Route("/data/entries/{run:number}/{after:number}", _found(entries)),
        Route("/images/{run:number}/{name}.png", _found(image)),
        Route("/{name}", lambda request: page(request.path_params["name"])),
    ]


def page(name: str) -> Response:
    """Serve a file of the page; HTTP 404 for another name."""
    if name not in PAGE_FILES:
        raise HTTPException(404, f"no page {name}")
    return Response(page_file(name), media_type=media_type(name))


def _found(endpoint: Endpoint) -> Endpoint:
    """Wrap an endpoint so that it responds with HTTP 404 for data that a run does not hold (any more)."""

    def answer(request: Request) -> Response:
        try:
            return endpoint(request)
        except FoveaError:
            raise  # the file exists but is damaged
        except (FileNotFoundError, IndexError, ValueError) as error:
            raise HTTPException(404, f"nothing at {request.url.path}: {error}") from error

    return answer


def _json(value: Any, status: int = 200) -> Response:
    # ASCII instead of starlette's UTF-8, which cannot encode lone surrogates that a data set may hold
    return _json_text(json.dumps(value, allow_nan=False), status)


def _json_text(text: str, status: int = 200) -> Response:
    return Response(text, status, media_type="application/json")


def _as_json(_request: Request, error: Exception) -> Response:
    """An error as JSON for the page: HTTP 422 for a damaged run folder, which is not a fault of the server."""
    status = error.status_code if isinstance(error, HTTPException) else 422
    text = error.detail if isinstance(error, HTTPException) else str(error)
    return _json({"error": text}, status)


class _SetHeaders:
    """Middleware that adds HEADERS to every response, without replacing headers that it already has."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name for name, _ in message["headers"]}  # the list of runs sets its own policy
                pairs = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                added = [pair for pair in pairs if pair[0] not in given]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        await self._app(scope, receive, send_with_headers)


HEADER_SECONDS = 5.0


class TimedHeaders(H11Protocol):
    """A connection that is closed if HEADER_SECONDS pass without complete request headers.

    uvicorn's own timeout starts only after a first request: connections that send nothing would use up all open files.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look()

    def _look(self, before: object = ()) -> None:
        cycle = cast(RequestResponseCycle | None, self.cycle)  # None before the first request
        waits = cycle is None or cycle.response_complete
        if (waits, cycle) == (True, before):
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(HEADER_SECONDS, self._look, cycle if waits else ())


def serve(app: ASGIApp, port: int, say: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C, on a free port if 0, and `say` its address; ConfigError if the port is taken."""
    # IPPROTO_TCP lets asyncio turn off Nagle's algorithm, with which most responses would wait 40 ms for an ACK
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOSTS[0], port))
            listener.listen()  # listen first: a browser that opens the address at once waits instead of being refused
        except OSError as error:
            raise ConfigError(f"--port {port}: {error.strerror}; give another port, or 0 for any free port") from error
        say(f"http://{HOSTS[0]}:{listener.getsockname()[1]}/")
        config = uvicorn.Config(app, http=TimedHeaders, log_level="warning", access_log=False)
        server = uvicorn.Server(config)
        try:
            server.run(sockets=[listener])
        except KeyboardInterrupt:
            return  # uvicorn raises the signal that stopped it again
