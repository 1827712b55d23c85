"""The web application of `fovea view FOLDER` for a folder of runs: a list of runs, and pages of one or several."""

from __future__ import annotations

import time
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, StrictUndefined
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route, Router
from starlette.types import Receive, Scope, Send

from fovea.report.viewed_run import PAGE_SECONDS, ViewedRun
from fovea.view.run_list import listed_runs, run_folders
from fovea.view.server import HEADERS, page, run_routes, secured

MAX_OPEN = 16
"""Maximum number of pages whose runs stay in memory."""
_POLICY = "content-security-policy"


def make_list_app(folder: Path) -> Starlette:
    """Create the application that lists the runs of a folder."""
    templates = Environment(autoescape=True, undefined=StrictUndefined)
    templates.filters |= {
        "quoted": lambda name: quote(name, safe=""),
        "time": lambda seconds: time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)),
    }
    template = templates.from_string(files("fovea.view").joinpath("runs.html.j2").read_text(encoding="utf-8"))

    def runs(_request: Request) -> Response:
        text = template.render(folder=str(folder), runs=listed_runs(folder))
        policy = HEADERS[_POLICY].replace("form-action 'none'", "form-action 'self'")
        return Response(text.encode("utf-8", errors="replace"), media_type="text/html", headers={_POLICY: policy})

    def compare(request: Request) -> Response:
        names = request.query_params.getlist("run")
        return RedirectResponse(f"runs/{quote(','.join(names), safe='')}/" if names else "./", status_code=303)

    return secured(
        [
            Route("/", runs),
            Route("/compare", compare),
            Mount("/runs/{names}", app=_Pages(folder)),
            Route("/{name}", lambda request: page(request.path_params["name"])),
        ]
    )


class _Pages:
    """Serves the page of a run, or of several runs joined by commas; the newest MAX_OPEN pages stay in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Router] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._page(scope["path_params"]["names"])(scope, receive, send)

    def _page(self, names: str) -> Router:
        if names not in self._open:
            page_of = Router(run_routes([ViewedRun(run, PAGE_SECONDS) for run in self._folders(names)]))
            self._open = dict([*self._open.items(), (names, page_of)][-MAX_OPEN:])
        return self._open[names]

    def _folders(self, names: str) -> list[Path]:
        """Folders of the named runs; HTTP 404 for a run that the list does not contain."""
        known = run_folders(self._folder)
        wanted = [names] if names in known else names.split(",")
        missing = [name for name in wanted if name not in known]
        if missing:
            raise HTTPException(404, f"no run {missing[0]} in this folder")
        return [known[name] for name in wanted]
