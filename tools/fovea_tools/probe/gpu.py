"""The checks of `fovea doctor --gpu`: correctness and speed of a GPU, and the speed that a recipe can expect."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fovea.config.loading import load_config
from fovea.config.recipes import shipped_recipe
from fovea.config.run import Config
from fovea.errors import ModelError
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.run.lifecycle import measure_parity
from fovea.run.parity_result import parity_failure
from fovea.utils.malloc import GPU_ALLOCATOR, GPU_ALLOCATOR_BEFORE
from fovea.wiring.run import build
from fovea_gym.utils.event_loop import wait_for
from fovea_tools.plan.compute import DECODE_BANDWIDTH_FRAC, UPDATE_MFU
from fovea_tools.plan.machine import machine_of
from fovea_tools.plan.plan import make_plan
from fovea_tools.probe import kernels
from fovea_tools.probe.rates import Check, CheckFailed, Rates, best_seconds, error_text, measure_rates, ring, run_checks

PROMPTS = 64
"""Number of prompts with two completions each: enough for several graphs and for rows to end at different times."""
QUIET = (
    *("warmup=null", "resume=never", "profile=false", "log.progress=false", "log.tensorboard=false"),
    *("environment.train_size=256", "environment.dev_size=8", "environment.test_size=8", "evaluate.dev_size=8"),
    *("evaluate.before_training=false", "evaluate.image_controls=false", "evaluate.shared_images_rows=1"),
)
COMPARED = ("grad_norm", "entropy", "reward")
LARGEST_DIFFERENCE = 1e-3
"""Largest relative difference of a metric from the CPU's in float32, since kernels sum in another order."""


def engine_beside_trainer(device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """Run the parity gate of a tiny model: paged decoding and captured graphs against the update's packed rows."""
    with TemporaryDirectory(prefix="fovea-doctor-") as folder:
        config = _shapes(folder, device, dtype, f"parity.prompts={PROMPTS}", f"rollout.prompts_per_step={PROMPTS}")
        reading = wait_for(measure_parity(build(config)))
    for kind in reading.kinds:
        yield f"{dtype}, {kind.kind}: {kind.tokens} tokens differ by {kind.mean_abs:.1e} on average"
    if not reading.passed:
        raise CheckFailed(parity_failure(reading))


def step_beside_cpu(device: torch.device) -> Iterator[str]:
    """Compare the metrics of GRPO's first step in float32 on a device with those on the CPU."""
    found, expected = (_first_step(each) for each in (device, torch.device("cpu")))
    for name in COMPARED:
        difference = abs(found[name] - expected[name]) / max(abs(expected[name]), 1e-6)
        if not difference <= LARGEST_DIFFERENCE:
            raise CheckFailed(f"{name} is {found[name]:.6g}, and {expected[name]:.6g} on the CPU")
        yield f"{name}: {found[name]:.6g}, {difference:.1e} from the CPU's"


def _first_step(device: torch.device) -> Mapping[str, float]:
    with TemporaryDirectory(prefix="fovea-doctor-") as folder:
        train(build(_shapes(folder, device, torch.float32, "max_steps=1", "parity.prompts=0")))
        return read_metrics(Path(folder))[0]


def _shapes(folder: str, device: torch.device, dtype: torch.dtype, *overrides: str) -> Config:
    model = (f"model.device={device.type}", f"model.dtype={str(dtype).removeprefix('torch.')}")
    words = [*QUIET, f"run_dir={json.dumps(folder)}", *model, *overrides]
    return load_config([shipped_recipe("shapes")], words)


GIGA, TERA, GIB = 1e9, 1e12, 2**30
ALLOCATOR = (GPU_ALLOCATOR, GPU_ALLOCATOR_BEFORE)
PINNED_BYTES = 2**28


def check_gpu(config: Config | None, say: Callable[[str], None], *, on_cpu: bool = False) -> bool:
    """Run all checks on the first CUDA device and report them line by line; False if any of them failed.

    `config` is the recipe whose speed is estimated. `on_cpu` runs the same checks on the CPU, to try them out. Raises
    ModelError without a CUDA device.
    """
    if not on_cpu and not torch.cuda.is_available():
        raise ModelError("--gpu, but torch sees no CUDA device; --gpu --cpu tries the same checks on the CPU")
    device = torch.device("cpu" if on_cpu else "cuda")
    failed = run_checks(checks_of(device, config), say)
    say(f"{len(failed)} checks failed: {'; '.join(failed)}" if failed else "all checks passed")
    say("send all of the above with a report of a fault, and the recipe with its settings")
    return not failed


def checks_of(device: torch.device, config: Config | None) -> Sequence[Check]:
    """All checks in order; the last one estimates the recipe, if there is one."""
    dtype, measure = torch.float32 if device.type == "cpu" else torch.bfloat16, cache(partial(measured, device))
    checks = [
        Check("machine", partial(machine, device)),
        Check("rates", partial(rate_lines, device, measure)),
        Check("attention of updates", partial(kernels.packed_rows, device, dtype)),
        Check("attention of vision towers", partial(kernels.vision_rows, device, dtype)),
        Check("attention of decode steps", partial(kernels.decoding, device, dtype, measure)),
        Check("delta nets (Qwen3.5)", partial(kernels.delta_nets, device, dtype)),
        Check("Liger's kernels", partial(kernels.liger, device, dtype)),
        Check("mixture of experts", partial(kernels.experts, device, dtype)),
        Check("master weights on the host", partial(kernels.host_masters, device, dtype)),
        Check("engine against trainer", partial(engine_beside_trainer, device, dtype)),
        Check("a step against the CPU", partial(step_beside_cpu, device)),
        Check("ring of all GPUs", partial(ring, device)),
    ]
    return checks if config is None else [*checks, Check("the recipe", partial(recipe, config, measure))]


def machine(device: torch.device) -> Iterator[str]:
    """Report versions and the device's properties."""
    yield f"Python {platform.python_version()}, {os.cpu_count()} cores, torch {torch.__version__}"
    if device.type == "cpu":
        yield "these are the CPU's figures, which say nothing about a GPU"
        return
    of = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    count, memory = torch.cuda.device_count(), f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    yield f"{count} x {of.name}, sm_{of.major}{of.minor}, {memory}"
    yield f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, NCCL {torch.cuda.nccl.version()}"
    yield from (f"{name}={os.environ[name]}" for name in ALLOCATOR if name in os.environ)


def measured(device: torch.device) -> Rates | CheckFailed:
    """The device's rates, or the error if they cannot be measured, which fails one check and stops no other."""
    on_cpu = device.type == "cpu"
    dtype, side, num_bytes = (torch.float32, 256, 2**22) if on_cpu else (torch.bfloat16, 8192, 2**32)
    try:
        return measure_rates(device.type, dtype, gemm_side=side, num_bytes=num_bytes)
    except Exception as error:  # keep only the text: the traceback would keep the tensors alive
        return CheckFailed(error_text(error))


def rate_lines(device: torch.device, measure: Callable[[], Rates | CheckFailed]) -> Iterator[str]:
    """Report the rates of matrix products, attention, memory, and copies from the host."""
    rates = measure()
    if isinstance(rates, CheckFailed):
        raise rates
    yield f"products {rates.gemm / TERA:,.2f} TFLOP/s, attention {rates.attention / TERA:,.2f} TFLOP/s"
    yield f"reading {rates.read / GIGA:,.0f} GB/s, copying {rates.copy / GIGA:,.0f} GB/s"
    if device.type == "cuda":
        host = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
        seconds = best_seconds(lambda: host.to(device, non_blocking=True), device.type)
        yield f"from the host's pinned memory {PINNED_BYTES / seconds / GIGA:,.0f} GB/s"


def recipe(config: Config, measure: Callable[[], Rates | CheckFailed]) -> Iterator[str]:
    """Report the expected rates of the recipe, if the device's rates are known."""
    rates = measure()
    if isinstance(rates, CheckFailed):
        yield "no estimate: the rates could not be measured"
    else:
        yield from expected(config, rates)


def expected(config: Config, rates: Rates) -> Iterator[str]:
    """Report a recipe's expected rates: rows at once, tokens per second, and an upper bound of the update's MFU."""
    machine = machine_of(config.plan, config.cluster, config.model.device)
    known = machine.gpu.peak_tflops
    measured = replace(machine.gpu, peak_tflops=rates.gemm / TERA, memory_gb_per_second=rates.read / GIGA)
    plan = make_plan(config, machine=replace(machine, gpu=measured))
    peak, usable = plan.peak.total / GIB, plan.machine.usable_bytes / GIB
    fits = f"{'fits' if plan.fits else 'DOES NOT FIT'}, with {peak:.1f} of {usable:.1f} GiB at the peak"
    yield f"{plan.model} on {machine.gpus} x {machine.gpu.name}: {fits}, in the {plan.peak.phase}"
    rollout = plan.compute[0]
    tokens = config.rollout.prompts_per_step * config.rollout.samples_per_prompt * plan.lengths.completion_tokens
    assert rollout.seconds is not None, "measured rates are known"
    if plan.rows is not None:
        yield f"rollout: {plan.rows:,} completions at once on average"
    speed = tokens / rollout.seconds
    yield f"rollout: {speed:,.0f} tokens/s at {DECODE_BANDWIDTH_FRAC:.0%} of the measured bandwidth"
    if known is not None:
        most = rates.gemm / TERA / known
        yield f"update: an MFU of {UPDATE_MFU * most:.0%} is assumed; matrix products by themselves reach {most:.0%}"
