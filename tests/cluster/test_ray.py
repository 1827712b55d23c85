"""Runs whose workers Ray starts, against the same runs in one process."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from fovea.cluster import loopback
from fovea.cluster.ray_token import make_token
from fovea.config.model import Model, TinyModel
from fovea.config.run import Config
from fovea.config.sections import Cluster
from fovea.metrics.log import read_metrics
from fovea.wiring.backends import open_backends
from fovea_gym.errors import ClusterError, ConfigError
from tests.cluster.ray_environment import NODE_CPUS, RayCluster, cluster_of, own_ray
from tests.cluster.torchrun_runs import LONG, LONG_STEPS, STEPS, compare, settings
from tests.runs import ROOT, command, environment, final_weights, fovea_here, run_program, untimed

pytest.importorskip("ray", reason="needs the extra ray")

LIMIT_SECONDS = 300
EACH_STEP = "checkpoint.every_steps=1"
ENGINES_ONLY = "cluster.placement=disaggregated"
TWO_AND_ONE = ("cluster.gpus_per_node=3", ENGINES_ONLY, "cluster.rollout_gpus=1")
"""Two learners and an engine."""
COLLOCATED = ("cluster.gpus_per_node=2",)
PROMPTS_PER_STEP = 6
IMAGE_BYTES = 36 * 3 * 2 * 8**2 * 4 + 3 * 8
"""36 patches of 8 x 8 pixels in three colours, twice, in float32; and the numbers of patches along three axes."""


@pytest.fixture(scope="module")
def ray_environment() -> Iterator[dict[str, str]]:
    """Environment in which a run finds no cluster, and starts one."""
    with own_ray() as own:
        yield own


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with cluster_of(*NODE_CPUS) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def on_ray(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two learners and an engine, on a node each, that nobody has killed."""
    run_dir = tmp_path_factory.mktemp("ray") / "run"
    three_nodes = ("cluster.num_nodes=3", "cluster.gpus_per_node=1", ENGINES_ONLY, "cluster.rollout_gpus=1")
    words = command("train", *settings("recipes/shapes.yaml", run_dir, EACH_STEP, *three_nodes))
    done = run_program(words, cluster.environment, seconds=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "ray" not in done.stderr.lower(), "Ray's own logs are on the terminal"
    return run_dir


@pytest.mark.slow
def test_two_learners_and_an_engine_on_three_nodes_train_as_one_process(on_ray: Path, tmp_path: Path) -> None:
    fovea_here("train", *settings("recipes/shapes.yaml", tmp_path))
    compare(tmp_path, on_ray)
    # each to the engine once and to one of the two learners, but one for dummies to both; without the first step, which
    # has the images of warm-up and evaluation too
    sent = [row["transfer/images_mib"] * 2**20 for row in read_metrics(on_ray)[1:]]
    # and the same for the two rows that are compared after each weight sync, also as images that no cache knows
    assert sent == pytest.approx([(2 * PROMPTS_PER_STEP + 1 + 2 * (2 * 2 + 1)) * IMAGE_BYTES] * (STEPS - 1))


@pytest.mark.slow
def test_a_run_waits_for_a_node_that_is_not_there_yet(tmp_path: Path) -> None:
    """And prints what is missing; without a time to wait it ends at once."""
    nodes = ("cluster.num_nodes=2", "cluster.gpus_per_node=1", "max_steps=1")
    words = command("train", *settings("recipes/shapes.yaml", tmp_path / "run", *nodes))
    with cluster_of(1) as cluster:
        refused = run_program([*words, "cluster.wait_minutes=0"], cluster.environment, seconds=LIMIT_SECONDS)
        assert refused.returncode == 2, refused
        missing = "need 1 CPUs on each of 2 nodes; the cluster's 1 nodes have 1, of which 1 are free"
        assert missing in refused.stderr
        with started([*words, "cluster.wait_minutes=5"], cluster.environment) as waiting:
            assert waiting.stderr is not None
            said = next(line for line in waiting.stderr if line.startswith("waiting for the Ray cluster: "))
            assert missing in said
            cluster.join(1)
            _, errors = waiting.communicate(timeout=LIMIT_SECONDS)
        assert waiting.returncode == 0, errors
    assert len(read_metrics(tmp_path / "run")) == 1


RESERVE_HERE = """
import sys
from fovea.cluster import ray
from fovea.config.sections import Cluster
from fovea_gym.errors import ConfigError

ray.PLACEMENT_SECONDS = 1e-4  # of a machine that is too busy for the real one
cluster, device = Cluster(gpus_per_node=2), sys.argv[1]
try:
    ray.RayWorkers(cluster, int, device=device).close()
    print("reserved")
except ConfigError as error:
    print(error)
"""


NO_GPUS = (
    "cluster.num_nodes=1 and cluster.gpus_per_node=2 need 2 GPUs on each of 1 nodes; the cluster's 1 nodes have 0, of "
    "which 0 are free; lower cluster.gpus_per_node"
)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "printed"), [("cpu", "reserved"), ("cuda", NO_GPUS)])
def test_a_run_waits_for_the_ray_that_it_has_started_and_not_for_gpus_that_it_lacks(
    device: str, printed: str, ray_environment: dict[str, str]
) -> None:
    """It ended when Ray took more than five seconds, with advice about a wait for other nodes."""
    without_gpus = {**ray_environment, "CUDA_VISIBLE_DEVICES": ""}
    done = run_program([sys.executable, "-c", RESERVE_HERE, device], without_gpus, seconds=LIMIT_SECONDS)
    assert done.stdout == f"{printed}\n", done.stderr
    assert device == "cpu" or "waiting for the Ray cluster" not in done.stderr


def started(words: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    """A process whose errors are read; what it prints is dropped."""
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, cwd=ROOT, env=environment, text=True, **pipes)


@contextmanager
def going(environment: dict[str, str], run_dir: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A run that has taken a step and is still going; killed at the end of the block if it still goes."""
    with started(command("train", *settings("recipes/shapes.yaml", run_dir, *more)), environment) as process:
        try:
            deadline = time.monotonic() + LIMIT_SECONDS
            while not read_metrics(run_dir):
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline, "no step was taken"
                time.sleep(0.02)
            yield process
        finally:
            process.kill()


def family_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """All processes of a run that has started Ray itself."""
    return cast(list[psutil.Process], psutil.Process(process.pid).children(recursive=True))


def workers_in(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [each for each in processes if is_worker(each)]


def is_worker(process: psutil.Process) -> bool:
    try:
        return "ray::RayWorker" in " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return False


def listening(process: psutil.Process) -> set[str]:
    """Addresses at which a process takes connections."""
    try:
        found = process.net_connections("inet")
    except psutil.Error:  # it has ended
        return set()
    return {each.laddr.ip.removeprefix("::ffff:") for each in found if each.status == psutil.CONN_LISTEN}


def outlived(processes: list[psutil.Process]) -> list[psutil.Process]:
    return cast(list[psutil.Process], psutil.wait_procs(processes, timeout=60)[1])


@pytest.mark.slow
@pytest.mark.kill
@pytest.mark.parametrize("server", ["gcs_server", "raylet"])
def test_the_death_of_rays_server_is_a_workers(server: str, ray_environment: dict[str, str], tmp_path: Path) -> None:
    """Ray's library may be the first to see it, and then ends the process with code 1 and without a word."""
    with going(ray_environment, tmp_path, EACH_STEP, *COLLOCATED, *LONG) as process:
        family = family_of(process)
        next(each for each in family if each.name() == server).kill()
        _, err = process.communicate(timeout=60)
        assert process.returncode == 3
    by_the_run = f"error: Ray's server {server} has ended, and with it the workers; start again"
    by_the_library = "a library ended the process with code 1, as Ray does when its raylet has ended, and max_res"
    assert by_the_run in err or by_the_library in err
    assert "max_restarts=0 allows no restart; resume=auto continues from the checkpoint of step" in err
    assert not outlived(family)


@pytest.mark.slow
@pytest.mark.kill
def test_a_run_that_has_lost_its_raylet_is_started_again(ray_environment: dict[str, str], tmp_path: Path) -> None:
    with going(ray_environment, tmp_path, EACH_STEP, *COLLOCATED, *LONG, "max_restarts=1") as process:
        family = family_of(process)
        next(each for each in family if each.name() == "raylet").kill()
        assert process.stderr is not None
        assert any("starting again from the checkpoint of step" in line for line in process.stderr)
        process.terminate()
        process.communicate(timeout=LIMIT_SECONDS)
    assert not outlived(family)


@pytest.mark.slow
@pytest.mark.kill
def test_a_run_whose_worker_is_killed_goes_on_by_itself(on_ray: Path, cluster: RayCluster, tmp_path: Path) -> None:
    with going(cluster.environment, tmp_path, EACH_STEP, *TWO_AND_ONE, "max_restarts=1") as process:
        workers = workers_in(cluster.processes())
        assert len(workers) == 3
        workers[1].kill()
        assert not outlived(workers), "old workers beside the new ones"
        while not (new := workers_in(cluster.processes())):
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        _, said = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 0, said
    assert "has ended" in said
    assert "a worker process failed: starting again from" in said
    assert not outlived(new), "workers left behind"
    sent = "transfer/images_mib"  # but for what a resume sends for its parity gate
    assert [row | {sent: 0} for row in untimed(tmp_path)] == [row | {sent: 0} for row in untimed(on_ray)]
    assert final_weights(tmp_path, STEPS) == final_weights(on_ray, STEPS)


LOSE_AN_ENGINE = """
import sys, threading, time
from pathlib import Path
from fovea import loop
from fovea.wiring.run import build
from fovea.config.loading import load_config
from fovea.metrics.log import read_metrics

run = build(load_config([Path(sys.argv[1])], sys.argv[2:]))

def kill() -> None:
    while not read_metrics(run.folder):
        time.sleep(0.02)
    run.engine._workers.engines[1].line.kill()  # its process, at once

threading.Thread(target=kill, daemon=True).start()
loop.train(run)
assert len(run.engine._workers.engines) == 1
"""


@pytest.mark.slow
@pytest.mark.kill
def test_a_run_that_loses_one_of_two_engines_goes_on(on_ray: Path, cluster: RayCluster, tmp_path: Path) -> None:
    """Without a restart, in the next step too: weights are then synced to the engine that is left."""
    two_engines = ("cluster.gpus_per_node=3", ENGINES_ONLY, "cluster.rollout_gpus=2")
    arguments = settings("recipes/shapes.yaml", tmp_path, EACH_STEP, *two_engines)
    words = [sys.executable, "-c", LOSE_AN_ENGINE, *arguments]
    done = run_program(words, cluster.environment, seconds=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    compare(on_ray, tmp_path)


@pytest.mark.slow
@pytest.mark.kill
def test_a_stopped_worker_ends_the_run(cluster: RayCluster, tmp_path: Path) -> None:
    """The other one waits in a collective call meanwhile."""
    patience = "cluster.heartbeat_timeout_seconds=10"
    with going(cluster.environment, tmp_path, *LONG, *COLLOCATED, patience) as process:
        workers = workers_in(cluster.processes())
        assert len(workers) == 2
        workers[1].suspend()
        _, said = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 3, said
    assert re.search(r"the worker process of rank [01] hangs: for cluster\.heartbeat_timeout_seconds=10", said)
    assert not outlived(workers), "workers left behind"


@pytest.mark.slow
@pytest.mark.kill
def test_sigterm_ends_the_run_saved(ray_environment: dict[str, str], tmp_path: Path) -> None:
    """With the Ray that it has started, and in which all listen only on loopback."""
    with going(ray_environment, tmp_path, *LONG, *COLLOCATED) as process:
        family = family_of(process)
        assert set().union(*map(listening, (psutil.Process(process.pid), *family))) == {"127.0.0.1"}
        process.terminate()
        _, said = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 143, said
    assert "SIGTERM: the run ends after this step" in said
    taken = len(read_metrics(tmp_path))
    assert taken < LONG_STEPS
    assert (tmp_path / "checkpoints" / f"step-{taken}").is_dir()
    assert not outlived(family), "processes left behind"


@pytest.mark.slow
@pytest.mark.kill
def test_a_killed_driver_leaves_no_worker_behind(ray_environment: dict[str, str], tmp_path: Path) -> None:
    with going(ray_environment, tmp_path, *LONG, *COLLOCATED) as process:
        workers = workers_in(family_of(process))
        assert len(workers) == 2
        (driver,) = psutil.Process(process.pid).children()
        driver.kill()
        _, err = process.communicate(timeout=60)
        assert process.returncode == 137
        assert "killed by signal 9 (Killed), and max_restarts=0 allows no restart; resume=auto continues" in err
        # those that serve the cluster end by themselves, some of them when they next look for their node
        assert not outlived(workers), "workers left behind"


@pytest.mark.slow
def test_a_cluster_is_shown_and_stopped(cluster: RayCluster) -> None:
    """Behind the tests whose runs are on it."""
    deadline = time.monotonic() + LIMIT_SECONDS
    # the head writes its report every few seconds
    while f"{sum(NODE_CPUS):.1f} CPU" not in (shown := run_cluster(cluster.environment, "status")).stdout:
        assert shown.returncode == 0, shown
        assert time.monotonic() < deadline, shown
    refused = run_cluster({**cluster.environment, "RAY_AUTH_TOKEN": "guessed"}, "status")
    assert refused.returncode == 3, refused
    assert "token is missing or incorrect" in refused.stderr
    nodes = [each for each in cluster.processes() if each.name() == "raylet"]
    assert len(nodes) == len(NODE_CPUS)
    if any(each.name() == "raylet" and each not in nodes for each in psutil.process_iter()):
        pytest.skip("another Ray cluster runs on this machine, which `ray stop` would end too")
    stopped = run_cluster(cluster.environment, "stop")
    assert stopped.returncode == 0, stopped.stderr
    assert not outlived(nodes)


def run_cluster(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_program(command("cluster", *arguments), environment, seconds=120)


def test_a_machine_without_the_token_joins_no_cluster(tmp_path: Path) -> None:
    without = {name: value for name, value in environment().items() if name != "RAY_AUTH_TOKEN"}
    joined = run_cluster({**without, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}, "start", "--address=head:6379")
    assert joined.returncode == 3
    assert "this machine has no token of the cluster at head:6379; copy" in joined.stderr


def test_a_machine_in_no_cluster_says_how_to_start_one(tmp_path: Path) -> None:
    if any(each.name() == "gcs_server" for each in psutil.process_iter()):
        pytest.skip("another Ray cluster runs on this machine, which Ray would find")
    shown = run_cluster({**environment(), "RAY_TMPDIR": str(tmp_path)}, "status")
    assert shown.returncode == 3
    assert "this machine is not a node of a cluster; run `fovea cluster start`" in shown.stderr


TWO_ON_RAY = Config(model=Model(tiny=TinyModel()), cluster=Cluster(gpus_per_node=2))


@pytest.mark.parametrize("left_by", ["environment", "crash"])
def test_a_cluster_that_is_gone_is_said_at_once(left_by: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In place of minutes in which Ray goes on asking."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(loopback, "ADDRESS_FILE", tmp_path / "address")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if left_by == "environment":
        monkeypatch.setenv("RAY_ADDRESS", address)
    else:
        (tmp_path / "address").write_text(f"{address}\n")
    with pytest.raises(ClusterError, match=f"no connection to the Ray cluster at {address}: .*refused.*; see `fovea"):
        open_backends(TWO_ON_RAY, TWO_ON_RAY.model, cast(Any, None))


def test_torchrun_and_ray_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun has started 2 processes; leave out torchrun"):
        open_backends(TWO_ON_RAY, TWO_ON_RAY.model, cast(Any, None))


def test_a_token_is_made_once_and_for_its_user_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "ray" / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    make_token()
    token = path.read_text()
    make_token()
    assert (path.read_text(), len(token), path.stat().st_mode & 0o777) == (token, 64, 0o600)
