"""The checks of `fovea doctor --gpu`, on the CPU: they run, and notice what they are for."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from fovea.cli.main import app
from fovea.config.loading import load_config
from fovea.config.recipes import shipped_recipe
from fovea.config.sections import Cluster, Plan
from fovea.models.shared_prefix.layout import shared_prefix_layout
from fovea.models.varlen import HeadShape
from fovea_tools.plan.compute import UPDATE_MFU
from fovea_tools.plan.machine import machine_of
from fovea_tools.plan.plan import make_plan
from fovea_tools.plan.table import plan_tables
from fovea_tools.probe import gpu, kernels, rates
from fovea_tools.probe.gpu import expected
from fovea_tools.probe.kernels import plain_attention
from fovea_tools.probe.rates import Check, CheckFailed, Rates, run_checks, with_cpu_rates
from tests.runs import fovea_here

CPU = torch.device("cpu")
RATES = Rates(gemm=700e12, attention=400e12, read=3000e9, copy=2800e9)


def test_a_failed_check_is_told_and_the_next_ones_run() -> None:
    def sound() -> Iterator[str]:
        yield "fine"

    def wrong() -> Iterator[str]:
        yield "first part"
        raise CheckFailed("off by 1")

    def broken() -> Iterator[str]:
        yield from kernels.packed_rows(CPU, torch.int8)

    said: list[str] = []
    assert run_checks([Check("a", wrong), Check("b", broken), Check("c", sound)], said.append) == ["a", "b"]
    assert said[1:3] == ["    first part", "    FAILED: off by 1"]
    assert said[4].startswith("    FAILED: ")
    assert "(kernels.py:" in said[4]
    assert said[-1] == "    fine"


def test_packed_rows_are_compared_with_attention_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, shape = shared_prefix_layout([7, 4], [[5, 2], [3]]), HeadShape(CPU, torch.float32, 4, 2, 8)
    assert max(kernels.packed_differences(layout, shape).values()) < 1e-6
    rounded = kernels.packed_differences(layout, replace(shape, dtype=torch.bfloat16))
    assert all(1e-4 < value < 2e-2 for value in rounded.values())
    # an attention that lets completions see each other
    other = shared_prefix_layout([7, 4], [[7], [3]])
    monkeypatch.setattr(kernels, "plain_attention", lambda _, *inputs: plain_attention(other, *inputs))
    assert min(kernels.packed_differences(layout, shape).values()) > 1e-2


def test_a_rate_counts_keys_and_values_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "best_kernel_seconds", lambda call, _: call() is None or 0.5)
    shape = HeadShape(CPU, torch.bfloat16, 4, 2, 16)
    rate = kernels.decode_rate(kernels.gathered_attention, shape, rows=3, keys=40)
    assert rate == 3 * 40 * 2 * 16 * 2 * 2 / 0.5


@pytest.mark.parametrize("check", [kernels.delta_nets, kernels.liger, kernels.experts, kernels.host_masters])
def test_a_check_of_kernels_passes_on_the_cpu(check: Callable[[torch.device, torch.dtype], Iterator[str]]) -> None:
    assert list(check(CPU, torch.float32))


def test_wrong_experts_and_wrong_delta_nets_fail_their_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.Experts.run_grouped
    monkeypatch.setattr(kernels.Experts, "run_grouped", lambda *given: right(*given) * 1.1)
    with pytest.raises(CheckFailed, match="output is off by"):
        list(kernels.experts(CPU, torch.float32))
    monkeypatch.setattr(kernels, "delta_refusals", lambda *_: {"chunks": "RuntimeError: #640"})
    with pytest.raises(CheckFailed, match="chunks of flash-linear-attention: RuntimeError: #640"):
        list(kernels.delta_nets(CPU, torch.float32))


def test_rates_that_cannot_be_measured_are_one_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> Rates:
        raise RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED")

    monkeypatch.setattr(gpu, "measure_rates", fails)
    names = ("machine", "rates", "attention of decode steps", "the recipe")
    checks = [check for check in gpu.checks_of(CPU, load_config([shipped_recipe("shapes")], [])) if check.name in names]
    said: list[str] = []
    assert run_checks(checks, said.append) == ["rates"]
    assert any("FAILED: RuntimeError: CUBLAS_STATUS_NOT_INITIALIZED" in line for line in said)
    assert said[-1] == "    no estimate: the rates could not be measured"


def test_the_ring_sums_over_processes() -> None:
    (line,) = rates.ring(CPU)
    assert line.startswith("2 processes: right; ")


def test_a_recipe_is_planned_with_the_measured_rates() -> None:
    settings = ["plan.gpu=h100", "plan.gpus=1", "model.tiny.num_layers=2"]
    config = load_config([shipped_recipe("shapes")], settings)
    once, twice = (list(expected(config, replace(RATES, read=read))) for read in (3e12, 6e12))
    assert once[0].startswith("tiny qwen3_vl on 1 x h100: fits, with ")
    assert once[1] == twice[1] == "rollout: 320 completions at once on average"
    slow, fast = (float(lines[2].split()[1].replace(",", "")) for lines in (once, twice))
    assert 1 < fast / slow < 2, "decoding waits for memory, prefill does not"
    assert "an MFU of 25% is assumed" in once[3], "35 % of the 71 % of the data sheet that products reach"


@pytest.mark.slow
def test_the_command_runs_every_check_on_the_cpu() -> None:
    done = fovea_here("doctor", "--gpu", "--cpu", "shapes")
    assert done.exit_code == 0, done.output
    for line in ("all checks passed", "differ by", "grad_norm: ", "tokens/s"):
        assert line in done.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_the_way_to_try_it_is_named() -> None:
    for options, said in ((["--gpu"], "--gpu --cpu"), (["--cpu"], "add --gpu")):
        done = CliRunner().invoke(app, ["doctor", *options])
        assert (done.exit_code, said in done.stderr) == (2, True), done.stderr


def test_a_plan_estimates_seconds_on_a_cpu_and_says_by_what() -> None:
    """From the same FLOPs as on a GPU, at the rates of each process's share of this machine."""
    done = fovea_here("plan", "recipes/shapes.yaml", "plan.gpu=cpu").stdout
    done = " ".join(done.split())
    assert "rough, from a matrix product (" in done
    assert "at most 0.403 million parameters" in done
    assert "with 1 image of 9," in done
    assert "GiB of each process at the peak" in done
    machine = machine_of(Plan(gpu="cpu", gpus=2), Cluster(), "cpu")
    measured = with_cpu_rates(machine, torch.float32)
    config = load_config([shipped_recipe("shapes")], ["plan.gpu=cpu", "plan.gpus=2"])
    rollout, update = make_plan(config, machine=measured).compute
    assert measured.gpu.peak_tflops is not None
    expected_seconds = update.flops / (2 * measured.gpu.peak_tflops * 1e12 * UPDATE_MFU)
    assert update.seconds == pytest.approx(expected_seconds)
    assert rollout.seconds is not None
    assert make_plan(config, machine=machine).compute[1].seconds is None


def test_rates_of_a_gpu_are_those_of_its_data_sheet() -> None:
    machine = machine_of(Plan(gpu="h100"), Cluster(), "cpu")
    assert with_cpu_rates(machine, torch.bfloat16) == machine
    unknown = replace(machine, gpu=replace(machine.gpu, name="GTX 9", peak_tflops=None))
    plan = make_plan(load_config([shipped_recipe("shapes")], []), machine=unknown)
    out = io.StringIO()
    Console(width=200, file=out).print(plan_tables(plan, []))
    assert "no seconds: the speed of GTX 9 is unknown" in out.getvalue()
