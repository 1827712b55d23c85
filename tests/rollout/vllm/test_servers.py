"""Two real servers as one engine: a run, the suite of all engines, servers that are killed, syncs through a folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
import torch

from fovea.config.backends import VllmServersSettings
from fovea.config.model import Model
from fovea.errors import EngineError
from fovea.models.tiny import TinyParts, save_tiny
from fovea.rollout.server_guard import KEY_FILE, made_key
from fovea.rollout.vllm.connect import connect
from fovea.rollout.vllm.servers import VllmServers
from fovea.types import Completion
from fovea_gym.utils.event_loop import wait_for
from tests.rollout.engine_suite import LIMIT_TOKENS, TOLERANCE, Served, ServingSuite, ask, equal, prompts_of
from tests.rollout.engines.under_test import served_by, sync
from tests.rollout.serve_command import KEY, KEY_ENV, Serving, serving
from tests.rollout.short_runs import QUICK, check_exact
from tests.runs import SMALL, train_here
from tests.tiny_models import tiny


@dataclass(frozen=True)
class Site:
    """A model's folder, the folder of weight syncs, and two servers for training on them."""

    parts: TinyParts
    model: Path
    weights: Path
    servers: list[Serving]
    stack: ExitStack

    def start(self, port: int | None = None) -> Serving:
        """Start a server, which ends with the stack."""
        words = ["--api-key-env", KEY_ENV, "--for-training", str(self.weights)]
        return self.stack.enter_context(serving(self.model, *words, port=port))

    def start_again(self, number: int) -> None:
        """Kill a server, and wait for another one in its place."""
        self.servers[number].kill()
        self.servers[number] = self.start(port=int(self.servers[number].url.rpartition(":")[2]))
        self.servers[number].wait_until_ready()

    def connect(self, *servers: Serving) -> VllmServers:
        urls = tuple(each.url for each in servers or self.servers)
        settings = VllmServersSettings(servers=urls, weights_dir=str(self.weights))
        model = Model(path=str(self.model), dtype="float32")
        return connect(settings, model, self.parts.processor, max_model_len=LIMIT_TOKENS)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two servers of a tiny model, which may not be ready yet. Their key is in this environment."""
    parts, folder = tiny("qwen3_vl"), tmp_path_factory.mktemp("servers")
    save_tiny(parts, folder / "model")
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv(KEY_ENV, KEY)
        made = Site(parts=parts, model=folder / "model", weights=folder / "weights", servers=[], stack=stack)
        # started together: each takes its time
        made.servers.extend(made.start() for _ in range(2))
        yield made


@pytest.fixture(scope="module")
def served(site: Site) -> Iterator[Served]:
    engine = site.connect()
    made = served_by(engine, site.parts)
    try:
        made.sync(7)
        yield made
    finally:
        wait_for(engine.close())


def test_servers_start_for_training(site: Site) -> None:
    assert all("rollout.engine=vllm_servers" in each.wait_until_ready() for each in site.servers)


def test_a_run_trains_with_servers(site: Site, tmp_path: Path) -> None:
    """The parity gate, two steps with a weight sync each, and evaluations."""
    urls = ", ".join(each.url for each in site.servers)
    engine = ["rollout.engine=vllm_servers", f"rollout.engine.servers=[{urls}]"]
    model = ["model.tiny=null", f"model.path={site.model}", "data.max_prompt_tokens=400"]
    more = [f"rollout.engine.weights_dir={site.weights}", "max_steps=2", "rollout.max_new_tokens=8"]
    train_here("shapes", tmp_path, *SMALL, *QUICK, *engine, *model, *more)
    check_exact(tmp_path, "vllm_servers", 2)
    files = [file.read_text(errors="replace") for file in tmp_path.rglob("*") if file.is_file()]
    assert made_key(site.weights) not in "".join(files)


class TestServers(ServingSuite):
    pass


def test_a_weight_sync_is_one_folder_and_a_partial_one_is_refused(served: Served, site: Site) -> None:
    request = ask("partial", prompts_of(served.parts)[1], n=2)
    before = served.generate(request)[0]
    assert len(list(site.weights.glob("run-*/[0-9]*/"))) == 1
    assert isinstance(served.engine, VllmServers)
    shapes = {name: tuple(weight.shape) for name, weight in served.parts.network.named_parameters()}
    missing = next(name for name in shapes if name.endswith("q_proj.weight"))
    del shapes[missing]
    with pytest.raises(EngineError, match=f"1 that vLLM needs were not sent, first {missing}"):
        served.engine.begin_sync(shapes)
    assert equal(before, served.generate(request)[0])


def forty(served: Served, interrupt: Callable[[], None] | None = None) -> list[Sequence[Completion]]:
    """The completions of forty requests; `interrupt` runs in a thread when five of them, short ones, were answered."""
    prompts = prompts_of(served.parts)
    requests = [ask(f"forty/{i}", prompts[i % 3], n=2, seed=i, max_new_tokens=4 if i < 10 else 60) for i in range(40)]

    async def together() -> list[Sequence[Completion]]:
        tasks = [asyncio.ensure_future(served.engine.generate(request)) for request in requests]
        while interrupt is not None and sum(task.done() for task in tasks) < 5:
            await asyncio.sleep(0.001)
        if interrupt is not None:
            await asyncio.to_thread(interrupt)
        return await asyncio.gather(*tasks)

    found = wait_for(together())
    assert [c.id for group in found for c in group] == [f"forty/{i}/{n}" for i in range(40) for n in range(2)]
    return found


def client_of(server: Serving, key: str) -> httpx2.Client:
    return httpx2.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"})


def test_whoever_may_ask_may_not_administer(site: Site) -> None:
    """With the key for asking; with that of administration, methods of workers other than ours are not called."""
    out = site.weights / "written"
    save = {"method": "save_sharded_state", "args": [str(out)]}
    facts = {"method": "fovea_facts", "args": []}
    with client_of(site.servers[0], KEY) as asking, client_of(site.servers[0], made_key(site.weights)) as trainer:
        assert asking.get("/v1/models").status_code == 200
        for path in ("/collective_rpc", "/pause", "/update_weights", "/inference/v1/generate", "/v1/load_lora_adapter"):
            assert asking.post(path, json=facts).status_code == 403, path
        assert trainer.post("/collective_rpc", json=save).status_code == 403
        assert trainer.post("/collective_rpc", json=facts).status_code == 200
    assert not out.exists()
    assert (site.weights / KEY_FILE).stat().st_mode & 0o777 == 0o600


def all_equal(first: list[Sequence[Completion]], second: list[Sequence[Completion]]) -> bool:
    return all(equal(a, b) for a, b in zip(first, second, strict=True))


def answered(server: Serving) -> int:
    """Number of requests that a server has answered since its start."""
    page = httpx2.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {KEY}"}).raise_for_status().text
    counts = [line.split()[-1] for line in page.splitlines() if line.startswith("vllm:request_success_total{")]
    assert counts
    return sum(int(float(each)) for each in counts)


def test_requests_that_a_server_breaks_off_are_made_again(served: Served, site: Site) -> None:
    expected = forty(served)
    with client_of(site.servers[0], made_key(site.weights)) as client:

        def abort() -> None:
            assert client.post("/abort_requests", json={}).json()["aborted"] > 0
            client.post("/resume").raise_for_status()

        # so that it has requests when it is told to abort them, on a machine of any speed
        client.post("/pause?mode=keep").raise_for_status()
        assert all_equal(expected, forty(served, abort))


def test_a_server_that_is_killed_costs_no_request_and_one_that_returns_has_the_present_weights(
    served: Served, site: Site
) -> None:
    """No request tells of the end of the first; the second has requests when it is killed."""
    with torch.no_grad():
        for parameter in served.parts.network.parameters():
            parameter.mul_(1.1)
    served.sync(30)
    expected = forty(served)
    # the files of the model are those of the beginning: what it gives then comes from the folder of weight syncs
    site.start_again(0)
    assert all_equal(expected, forty(served))
    # the other one may have sampled all of these, while the first got its weights
    while not answered(site.servers[0]):
        assert all_equal(expected, forty(served))
    site.servers[1].suspend()
    later = forty(served, site.servers[1].kill)
    assert all_equal(expected, later)
    assert {c.version for group in later for c in group} == {30}
    request = ask("returned", prompts_of(served.parts)[2], n=2)
    assert served.largest_difference(request, served.generate(request)[0]) < TOLERANCE


def test_no_completion_is_drawn_from_the_weights_of_another_run(site: Site) -> None:
    """A second run syncs while the first has nothing running; the last test, with its own runs."""
    first, other = (site.connect(site.servers[0]) for _ in range(2))
    request = ask("mine", prompts_of(site.parts)[2], n=2)
    try:
        sync(first, site.parts, 1)
        expected = wait_for(first.generate(request))
        sync(other, site.parts, 1)
        for use in (lambda: wait_for(first.generate(request)), lambda: sync(first, site.parts, 2)):
            with pytest.raises(EngineError, match="another run has sent its weights since"):
                use()
        assert equal(expected, wait_for(other.generate(request)))
    finally:
        wait_for(first.close())
        wait_for(other.close())
