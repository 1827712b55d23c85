"""A resources server by NeMo-Gym's published protocol: `nemo_gym_server.py PORT`.

The package itself needs Python 3.13 and is on no registry. Sessions are known by a cookie, as they are there.
"""

from __future__ import annotations

import sys
import uuid
from typing import Any

import uvicorn
from openai.types.responses import Response as ModelResponse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

SECRETS: dict[str, dict[str, Any]] = {}
"""The row of each session."""


async def seed_session(request: Request) -> Response:
    row, name = await request.json(), uuid.uuid4().hex
    if row.get("broken"):
        return JSONResponse({"detail": "no such game"}, status_code=500)
    SECRETS[name] = row
    answer = JSONResponse({})
    answer.set_cookie("session", name)
    return answer


async def look(request: Request) -> Response:
    arguments = await request.json()
    if arguments["at"] > 2:
        return JSONResponse({"detail": f"nothing is at {arguments['at']}"}, status_code=422)
    return JSONResponse({"seen": SECRETS[request.cookies["session"]]["secret"][arguments["at"]]})


async def verify(request: Request) -> Response:
    body = await request.json()
    row = SECRETS[request.cookies["session"]]
    response = ModelResponse.model_validate(body["response"], strict=True)
    calls = [item for item in response.output if item.type == "function_call"]
    answer = next(item for item in reversed(response.output) if item.type == "message").content[0]
    is_right = answer.type == "output_text" and answer.text == row["secret"]
    kinds = [item.type for item in response.output]
    shown = {"reward": row.get("reward", float(is_right)), "kinds": kinds, "names": [call.name for call in calls]}
    return JSONResponse({**body, **shown, "reward_components": {"right": float(is_right), "calls": len(calls)}})


if __name__ == "__main__":
    routes = [Route(f"/{each.__name__}", each, methods=["POST"]) for each in (seed_session, look, verify)]
    uvicorn.run(Starlette(routes=routes), port=int(sys.argv[1]), log_level="warning")
