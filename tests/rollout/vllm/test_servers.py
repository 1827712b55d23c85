"""Two real servers as one engine: the suite of all engines, servers that are killed, and pushes through a folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import httpx2
import pytest
import torch

from fovea.errors import EngineError
from fovea.rollout.vllm.servers import VllmServers
from fovea.types import Completion
from fovea.utils.event_loop import wait_for
from tests.rollout.engine_suite import TOLERANCE, Served, ServingSuite, ask, equal, prompts_of
from tests.rollout.serve_command import KEY
from tests.rollout.vllm.sites import Site, push, two_servers


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with two_servers(tmp_path_factory.mktemp("servers")) as made:
        yield made


@pytest.fixture(scope="module")
def served(site: Site) -> Iterator[Served]:
    engine = site.connect()
    push(engine, site.parts, 7)
    try:
        yield Served(parts=site.parts, engine=engine, push=lambda version: push(engine, site.parts, version))
    finally:
        wait_for(engine.close())


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


def test_a_push_over_that_of_another_trainer_is_refused(served: Served, site: Site) -> None:
    other = site.connect()
    try:
        push(other, site.parts, 1)
        with pytest.raises(EngineError, match="another run has pushed its weights since"):
            served.push(27)
    finally:
        wait_for(other.close())
    served.push(28)


def test_a_server_that_is_started_again_between_two_requests_has_the_present_weights(
    served: Served, site: Site
) -> None:
    """No request tells of its end, and its files have other weights."""
    with torch.no_grad():
        for parameter in served.parts.network.parameters():
            parameter.mul_(1.1)
    served.push(29)
    expected = forty(served)
    site.start_again(0)
    assert all_equal(expected, forty(served))


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
    site.start_again(0)
    second.kill()
    later = forty(served)
    assert all_equal(expected, later)
    assert {c.version for group in later for c in group} == {30}
    request = ask("returned", prompts_of(served.parts)[2], n=2)
    assert served.largest_difference(request, served.generate(request)[0]) < TOLERANCE
