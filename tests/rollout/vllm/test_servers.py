"""Two real servers as one engine: the suite of all engines, servers that are killed, and pushes through a folder."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
import torch

from fovea.cluster.engine_stream import EngineStream
from fovea.cluster.local import call_here
from fovea.cluster.streamed import StreamedWeights
from fovea.config.backends import VllmServersEngine as Settings
from fovea.config.run import Model
from fovea.errors import EngineError
from fovea.metrics.log import read_metrics
from fovea.models.outgoing import outgoing_merged
from fovea.models.tiny import TinyParts, save_tiny
from fovea.rollout.vllm.connect import connect
from fovea.rollout.vllm.servers import VllmServers
from fovea.types import Completion
from fovea.utils.event_loop import wait_for
from tests.rollout.engine_suite import LIMIT_TOKENS, TOLERANCE, Served, ServingSuite, ask, equal, prompts_of
from tests.rollout.serve_command import KEY, KEY_ENV, Serving, serving
from tests.test_runs import ROOT, command, environment
from tests.tiny_models import tiny


@dataclass(frozen=True)
class Site:
    """A model's folder, the folder of pushes, and two servers for training on them."""

    parts: TinyParts
    model: Path
    weights: Path
    servers: list[Serving]

    def words(self) -> list[str]:
        return ["--api-key-env", KEY_ENV, "--for-training", str(self.weights)]

    def settings(self) -> list[str]:
        """Settings of a short run with these servers."""
        urls = ", ".join(each.url for each in self.servers)
        engine = [
            "rollout.engine=vllm_servers",
            f"rollout.engine.servers=[{urls}]",
            f"rollout.engine.api_key_env={KEY_ENV}",
        ]
        model = ["model.tiny=null", f"model.path={self.model}", "warmup=null", "data.max_prompt_tokens=400"]
        rows = ["environment.train_size=64", "environment.dev_size=8", "environment.test_size=8", "evaluate.dev_size=8"]
        steps = [
            "max_steps=2",
            "rollout.max_new_tokens=8",
            "rollout.prompts_per_step=4",
            "evaluate.image_controls=false",
        ]
        shared = [f"rollout.engine.weights_dir={self.weights}", f"rollout.engine.api_key_env={KEY_ENV}"]
        return [*engine, *shared, *model, *rows, *steps]

    def connect(self, **settings: object) -> VllmServers:
        given = {"servers": tuple(each.url for each in self.servers), "weights_dir": str(self.weights)} | settings
        return connect(
            Settings(api_key_env=KEY_ENV, **given),  # type: ignore[arg-type]
            Model(path=str(self.model), dtype="float32"),
            self.parts.processor,
            max_model_len=LIMIT_TOKENS,
        )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("servers")
    parts = tiny("qwen3_vl")
    save_tiny(parts, folder / "model")
    made = Site(parts=parts, model=folder / "model", weights=folder / "weights", servers=[])
    with ExitStack() as stack:
        # started together: each takes its time
        made.servers.extend(stack.enter_context(serving(made.model, *made.words())) for _ in range(2))
        yield made


@pytest.fixture(scope="module")
def served(site: Site) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_ENV, KEY)
        engine = site.connect()
    push(engine, site.parts, 7)
    try:
        yield Served(parts=site.parts, engine=engine, push=lambda version: push(engine, site.parts, version))
    finally:
        wait_for(engine.close())


def push(engine: VllmServers, parts: TinyParts, version: int) -> None:
    """Push the weights of the network."""
    sync = StreamedWeights(lambda: outgoing_merged(parts.network), torch.float32, [EngineStream(engine)], call_here)
    wait_for(sync.push(version))


@pytest.mark.parametrize("number", [0, 1])
def test_a_server_starts_for_training(site: Site, number: int) -> None:
    assert "rollout.engine=vllm_servers" in site.servers[number].wait_until_ready()


class TestServers(ServingSuite):
    pass


def test_a_push_is_one_folder_and_a_partial_one_is_refused(served: Served, site: Site) -> None:
    request = ask("partial", prompts_of(served.parts)[1], n=2)
    before = served.generate(request)[0]
    assert len(list(site.weights.iterdir())) == 1
    assert isinstance(served.engine, VllmServers)
    shapes = {name: tuple(weight.shape) for name, weight in served.parts.network.named_parameters()}
    missing = next(name for name in shapes if name.endswith("q_proj.weight"))
    del shapes[missing]
    with pytest.raises(EngineError, match=f"1 that vLLM needs were not sent, first {missing}"):
        served.engine.begin_push(shapes)
    assert equal(before, served.generate(request)[0])


def forty(served: Served, interrupt: Callable[[], None] | None = None) -> list[Sequence[Completion]]:
    """The completions of forty requests; `interrupt` runs in a thread when five of them, short ones, were answered."""
    prompts = prompts_of(served.parts)
    requests = [ask(f"forty/{i}", prompts[i % 3], n=2, seed=i, max_new_tokens=4 if i < 5 else 100) for i in range(40)]

    async def together() -> list[Sequence[Completion]]:
        tasks = [asyncio.ensure_future(served.engine.generate(request)) for request in requests]
        while interrupt is not None and sum(task.done() for task in tasks) < 5:
            await asyncio.sleep(0.001)
        if interrupt is not None:
            assert sum(task.done() for task in tasks) < 35, "not in the middle"
            await asyncio.to_thread(interrupt)
        return await asyncio.gather(*tasks)

    found = wait_for(together())
    assert [c.id for group in found for c in group] == [f"forty/{i}/{n}" for i in range(40) for n in range(2)]
    return found


def all_equal(first: list[Sequence[Completion]], second: list[Sequence[Completion]]) -> bool:
    return all(equal(a, b) for a, b in zip(first, second, strict=True))


def test_requests_that_a_server_breaks_off_are_made_again(served: Served, site: Site) -> None:
    expected, aborted = forty(served), 0
    with httpx2.Client(base_url=site.servers[0].url, headers={"authorization": f"Bearer {KEY}"}) as client:

        def abort() -> None:
            nonlocal aborted
            aborted += client.post("/abort_requests", json={}).json()["aborted"]

        for _ in range(10):  # by the time of the call a fast server may have drawn all that it had
            assert all_equal(expected, forty(served, abort))
            if aborted:
                return
    pytest.fail("all requests ended before one was broken off, ten times")


def test_a_run_trains_with_servers(site: Site, tmp_path: Path) -> None:
    """The parity gate, two steps with a push each, and evaluations."""
    done = subprocess.run(
        command("train", "recipes/shapes.yaml", f"run_dir={tmp_path}", *site.settings()),
        cwd=ROOT,
        env=environment() | {KEY_ENV: KEY},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    parity = json.loads((tmp_path / "parity.json").read_text(encoding="utf-8"))
    assert (parity["engine"], parity["passed"]) == ("vllm_servers", True)
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2]
    # float32 on both sides: two orders of summation, and nothing else
    assert max(row["rollout_train_max"] for row in rows) < TOLERANCE
    assert KEY not in "".join(file.read_text(errors="replace") for file in tmp_path.rglob("*") if file.is_file())


def test_a_server_that_is_killed_costs_no_request_and_one_that_returns_has_the_present_weights(
    served: Served, site: Site
) -> None:
    with torch.no_grad():
        for parameter in served.parts.network.parameters():
            parameter.mul_(1.01)
    served.push(30)
    expected = forty(served)
    first, second = site.servers
    assert all_equal(expected, forty(served, first.kill))

    # the files of the model are those of the beginning: what it gives then comes from the folder of pushes
    port = int(first.url.rpartition(":")[2])
    with serving(site.model, *site.words(), port=port) as again:
        again.wait_until_ready()
        second.kill()
        later = forty(served)
        assert all_equal(expected, later)
        assert {c.version for group in later for c in group} == {30}
        request = ask("returned", prompts_of(served.parts)[2], n=2)
        assert served.largest_difference(request, served.generate(request)[0]) < TOLERANCE
