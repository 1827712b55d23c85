"""vLLM servers as an `Engine`: separate processes, on any machine, that share a folder with this one.

Requests to `/inference/v1/generate` carry the same expanded token ids and processed pixels as for vLLM in this process.
Every weight sync sends all weights, so that a restarted server can load the current ones from the folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm import SamplingParams
from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import encode_mm_kwargs_item

from fovea.errors import EngineError
from fovea.rollout.outputs import FINISHES, CompletionText, EngineOutput, Sampled, completions
from fovea.rollout.server import BROKEN_SYNC, CLOSED, Readiness, check_idle
from fovea.rollout.server_guard import App, Message, Receive, Send, answer, header, refuse, whole_body
from fovea.rollout.server_pool import PooledServer, ServerPool, TakenError, understood
from fovea.rollout.vllm.inputs import VllmTranslator
from fovea.rollout.vllm.sync_folder import OTHER_RUN, Sync, SyncFolder, run_of
from fovea.rollout.vllm.weights import ExpectedWeights, compare
from fovea.types import Completion, Request, Shape
from fovea_gym.errors import first_line, named
from fovea_gym.utils.event_loop import BackgroundLoop
from fovea_gym.utils.http_json import CallError, JsonServer

SYNC_HEADER = "x-fovea-sync"
"""Request header with the name of the weight sync that the request is for."""
RPC = "/collective_rpc"
FACTS, LOAD = "fovea_facts", "load_sync"
"""Methods of `server_worker.FolderReceiver` that a trainer calls."""
FORBIDDEN, CONFLICT = 403, 409
OTHER_WEIGHTS = b"this server does not hold the weights of that weight sync"


class SameSync:
    """ASGI middleware that refuses requests for a weight sync that this server does not hold, and calls its workers.

    A restarted server holds no weight sync, and another run may have sent its own: without this check, completions
    would be sampled with the wrong weights. vLLM's own `/collective_rpc` would call any method of its workers.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._held = b""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == RPC:
            return await self._call_workers(scope, receive, send)
        wanted = header(scope, SYNC_HEADER.encode()) if scope["type"] == "http" else b""
        if not wanted:
            return await self._app(scope, receive, send)
        if wanted != self._held:
            return await refuse(send, CONFLICT, OTHER_WEIGHTS)
        return await self._app(scope, receive, self._unless_changed(send))

    def _unless_changed(self, send: Send) -> Send:
        """A `send` that refuses a request instead of answering it if other weights were loaded since it arrived."""
        held, is_refused = self._held, False

        async def checked(message: Message) -> None:
            nonlocal is_refused
            # compared by identity: the same weight sync may have been loaded again after another one
            if message["type"] == "http.response.start" and self._held is not held:
                is_refused = True
                await refuse(send, CONFLICT, OTHER_WEIGHTS)
            elif not is_refused:
                await send(message)

        return checked

    async def _call_workers(self, scope: Message, receive: Receive, send: Send) -> None:
        """Call one of our methods in each worker, and answer with the results."""
        call = json.loads(await whole_body(receive) or b"{}")
        method, arguments = call.get("method"), call.get("args", [])
        if method not in (FACTS, LOAD):
            return await refuse(send, FORBIDDEN, b"only the trainer's methods may be called")
        results = await self._load(scope, arguments) if method == LOAD else await _on_workers(scope, FACTS, arguments)
        await answer(send, 200, json.dumps({"results": results}).encode())

    async def _load(self, scope: Message, arguments: list[Any]) -> list[dict[str, Any]]:
        try:
            results = await _on_workers(scope, LOAD, arguments)
        except BaseException:
            self._held = b""  # the load may have failed at any point
            raise
        if not any("problem" in each for each in results):
            self._held = str(arguments[0]).encode()
        return results


async def _on_workers(scope: Message, method: str, arguments: list[Any]) -> list[dict[str, Any]]:
    engine = scope["app"].state.engine_client
    results: list[dict[str, Any]] = await engine.collective_rpc(method, args=tuple(arguments))
    return results


SENT = (
    "n",
    "temperature",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "logprobs",
    "detokenize",
)
"""Sampling parameters that `rollout.vllm.inputs.VllmTranslator` sets and a server accepts."""


def generate_body(prompt: Mapping[str, Any], sampling: SamplingParams) -> dict[str, Any]:
    """Build a request's body from the prompt and parameters that an engine in this process would get."""
    body: dict[str, Any] = {
        "token_ids": prompt["prompt_token_ids"],
        # returns the token ids that vLLM used, to be compared with ours
        "return_token_ids": True,
        # a bias of minus infinity becomes -Infinity, which Python's JSON accepts on both sides
        "sampling_params": {name: getattr(sampling, name) for name in SENT},
    }
    if "mm_kwargs" in prompt:
        places = prompt["mm_placeholders"]["image"]
        body["features"] = {
            "mm_hashes": {"image": list(prompt["mm_hashes"]["image"])},
            "mm_placeholders": {"image": [{"offset": each.offset, "length": each.length} for each in places]},
            "kwargs_data": {"image": [encode_mm_kwargs_item(item) for item in prompt["mm_kwargs"]["image"]]},
        }
    return body


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """Properties that the trainer requires of a server."""

    dtype: str
    max_model_len: int
    """Maximum number of tokens of a prompt with its completion."""
    max_images: int
    """Maximum number of images of a prompt."""

    def check(self, url: str, found: Mapping[str, Any]) -> None:
        """Raise EngineError unless `found`, the result of `FolderReceiver.fovea_facts`, meets these requirements."""
        again = "restart it with fovea serve MODEL --for-training DIR"
        if found["logprobs_mode"] != "processed_logprobs" or found["normalizes_pixels"]:
            raise EngineError(f"{url} returns log-probs of a distribution that is not the trained one; {again}")
        if found["dtype"] != self.dtype:
            raise EngineError(
                f"{url} computes in {found['dtype']}, but the trainer in {self.dtype}; {again} dtype={self.dtype}"
            )
        for name in ("max_model_len", "max_images"):
            if found[name] < getattr(self, name):
                argument = "max_model_len=" if name == "max_model_len" else "limit_mm_per_prompt.image="
                raise EngineError(
                    f"{url} has {name}={found[name]}, but the run needs {getattr(self, name)}; {again} "
                    f"{argument}{getattr(self, name)}"
                )


class VllmServers:
    """Samples completions with several servers, which the user starts and stops."""

    def __init__(
        self,
        servers: Sequence[JsonServer],
        wanted: ServerFacts,
        expected: ExpectedWeights,
        folder: SyncFolder,
        translator: VllmTranslator,
        text: CompletionText,
        *,
        restart_seconds: float,
    ) -> None:
        """Wait until all servers are ready; EngineError if one is not ready in time, or not as `wanted`."""
        self._wanted = wanted
        self._expected = expected
        self._folder = folder
        self.translator = translator
        self._text = text
        # a separate thread: while the trainer computes on the run's loop, responses would wait there and time out
        self._loop = BackgroundLoop("vLLM servers")
        self._sync: Sync | None = None
        self._loaded: dict[str, str] = {}
        """By server address, the weight sync that it holds, with all caches of older weights emptied."""
        self._own: set[str] = set()
        """Addresses of the servers that have loaded a weight sync of this run, and may not hold another run's."""
        self._readiness = Readiness(max_model_len=wanted.max_model_len, max_images=wanted.max_images)
        self._num_running = 0
        self._pool = ServerPool(
            members=[PooledServer(server) for server in servers], prepare=self._prepare, restart_seconds=restart_seconds
        )
        try:
            self._loop.wait(self._pool.start())
        except BaseException:
            self._loop.close(self._pool.close)
            raise

    @property
    def name(self) -> str:
        return "vllm_servers"

    async def generate(self, request: Request) -> Sequence[Completion]:
        """Sample n completions of one prompt.

        Raises EngineError if they cannot fit, or while the engine is asleep; LostEngineError if no server is left.
        """
        self._readiness.check(request)
        with named(lambda error: EngineError(f"vLLM refuses request {request.id}: {first_line(error)}")):
            body = generate_body(self.translator.prompt(request.prompt), self.translator.sampling(request))
        self._num_running += 1
        try:
            assert self._sync is not None, "no weight sync to sample with"
            call = self._pool.post(
                "/inference/v1/generate",
                body,
                headers={SYNC_HEADER: self._sync.name},
                load=request.n,
                parse=_engine_output,
            )
            sampled: EngineOutput = await self._loop.run(call)
        finally:
            self._num_running -= 1
        return completions(request, sampled, self._text, version=self._readiness.sampled_with)

    async def sleep(self) -> None:
        """Refuse requests until `wake`; frees no memory, since the trainer does not share the servers' devices."""
        check_idle("sleep was called", self._num_running)
        self._readiness.asleep = True

    async def wake(self) -> None:
        """Accept requests again."""
        self._readiness.asleep = False

    async def close(self) -> None:
        """Close the connections, and delete the last weight sync; the servers keep running."""
        self._readiness.lose_weights(CLOSED)
        self._loop.close(self._pool.close)
        self._folder.delete()

    @property
    def has_weights(self) -> bool:
        """False, so that every weight sync sends all weights: a restarted server has none of them."""
        return False

    def begin_sync(self, shapes: Mapping[str, Shape]) -> None:
        """Prepare for all weights; raises EngineError, without any change, while requests run or for a mismatch."""
        check_idle("new weights arrived", self._num_running)
        self._expected.check(shapes)
        self._readiness.lose_weights(BROKEN_SYNC)
        self._folder.begin()

    def receive_weights(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Write a bucket of weights to the folder."""
        self._folder.write(bucket)

    def finish_sync(self, version: int) -> None:
        """Make all servers load the weight sync and empty their caches, and compare every value that they hold."""
        self._sync = self._folder.finish()
        self._loop.wait(self._pool.on_all(self._load))
        self._folder.delete_older()
        self._readiness.version = version

    async def _prepare(self, server: JsonServer) -> None:
        """Check a server that is new or was lost, and make it load the current weights unless it has them."""
        await server.get("/health")
        # a restarted server has lost the weights that it held
        if await self._held(server) != {self._loaded.get(server.url)}:
            self._loaded.pop(server.url, None)
        # repeated if another weight sync has arrived meanwhile
        while (sync := self._sync) is not None and self._loaded.get(server.url) != sync.name:
            await self._load(server)

    async def _held(self, server: JsonServer) -> set[str]:
        """Names of the weight syncs that a server's workers hold.

        Raises EngineError if the server is unsuitable, and TakenError if another run has taken it over.
        """
        facts = await _rpc(server, FACTS)
        with understood(server, RPC):
            for found in facts:
                self._wanted.check(server.url, found)
            held = {found["held_sync"] for found in facts}
        if server.url in self._own and any(sync and run_of(sync) != self._folder.run for sync in held):
            raise TakenError(f"{server.url}: {OTHER_RUN}")
        return held

    async def _load(self, server: JsonServer) -> None:
        """Make a server load the current weight sync, after aborting requests that nobody waits for any longer."""
        sync = self._sync
        assert sync is not None, "no weight sync to load"
        # first, so that no request of another run is aborted
        await self._held(server)
        self._loaded.pop(server.url, None)
        await server.post("/pause?mode=abort")
        takes_over = server.url not in self._own
        for found in await _rpc(server, LOAD, sync.name, takes_over, self._expected.slices):
            if "problem" in found:
                error = TakenError if found["problem"] == OTHER_RUN else EngineError
                raise error(f"{server.url}: {found['problem']}")
            with understood(server, RPC):
                compare(sync.hashes, found["arrived"])
                compare({name: sync.hashes_there[name] for name in found["held"]}, found["held"])
        self._own.add(server.url)
        emptied = await server.post("/reset_prefix_cache")
        with understood(server, "/reset_prefix_cache"):
            is_empty = emptied["success"]
        if not is_empty:
            raise EngineError(f"{server.url} did not empty its prefix cache after a weight sync; restart it")
        await server.post("/reset_mm_cache")
        await server.post("/reset_encoder_cache")
        await server.post("/resume")
        self._loaded[server.url] = sync.name


async def _rpc(server: JsonServer, method: str, *arguments: Any) -> list[dict[str, Any]]:
    """Call a method in every worker and return the results; EngineError if the server has no such method."""
    try:
        answer = await server.post(RPC, {"method": method, "args": arguments})
    except CallError as error:
        if error.status in (401, 403, 404):
            raise EngineError(
                f"{server.url} was not started for training with the folder rollout.engine.weights_dir; start it with "
                "fovea serve MODEL --for-training DIR"
            ) from error
        raise
    with understood(server, RPC):
        found: list[dict[str, Any]] = answer["results"]
    return found


def _engine_output(answer: Mapping[str, Any]) -> EngineOutput | None:
    """Parse the completions in a response; None if the server has aborted one of them."""
    if not all(choice["finish_reason"] in FINISHES for choice in answer["choices"]):
        return None
    found = {}
    for choice in answer["choices"]:
        content = choice["logprobs"]["content"]
        assert [each["token_id"] for each in content] == choice["token_ids"], "the log-probs belong to other tokens"
        found[int(choice["index"])] = Sampled(
            token_ids=choice["token_ids"],
            logprobs=[each["logprob"] for each in content],
            finish_reason=choice["finish_reason"],
        )
    return EngineOutput(prompt_ids_L=answer["prompt_token_ids"], completions=found)
