"""The parts of the package `openenv` that `openenv_server.py` uses, by its published protocol, where it is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

A, O, S = TypeVar("A"), TypeVar("O"), TypeVar("S")  # noqa: E741


class Action(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Observation(BaseModel):
    done: bool = False
    reward: float | None = None


class State(BaseModel):
    step_count: int = 0


class Environment(Generic[A, O, S]):
    pass


def create_app(
    make: Callable[[], Any], action_cls: type[Action], observation_cls: type[Observation], max_concurrent_envs: int
) -> Starlette:
    num_open = 0

    async def session(socket: WebSocket) -> None:
        nonlocal num_open
        await socket.accept()
        if num_open >= max_concurrent_envs:
            await socket.send_json({"type": "error", "data": {"message": "Server at capacity: 8/8 sessions active"}})
            return await socket.close()
        num_open += 1
        environment = make()
        try:
            while True:
                await socket.send_json(answer(environment, await socket.receive_json()))
        except WebSocketDisconnect:
            num_open -= 1

    def answer(environment: Any, message: dict[str, Any]) -> dict[str, Any]:
        try:
            if message["type"] == "reset":
                seen = environment.reset(**message["data"])
            else:
                seen = environment.step(action_cls.model_validate(message["data"]))
        except ValidationError:
            return {"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR"}}
        except Exception as error:
            return {"type": "error", "data": {"message": str(error), "code": "EXECUTION_ERROR"}}
        observation = seen.model_dump(exclude={"reward", "done"})
        return {"type": "observation", "data": {"observation": observation, "reward": seen.reward, "done": seen.done}}

    return Starlette(routes=[WebSocketRoute("/ws", session)])
