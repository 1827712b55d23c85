"""Checks by runs of the recipe `shapes`: engine beside trainer on a device, and a step there beside one on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fovea.config.loading import load_config
from fovea.config.recipes import shipped_recipe
from fovea.config.run import Config
from fovea.loop import train
from fovea.metrics.log import read_metrics
from fovea.run.lifecycle import measure_parity
from fovea.run.parity_reading import parity_failure
from fovea.tools.probe.checks import CheckFailed
from fovea.utils.event_loop import wait_for
from fovea.wiring.run import build

PROMPTS = 64
"""Rows of two completions each: enough that rows finish at different times, and that several graphs are captured."""
QUIET = (
    *("warmup=null", "resume=never", "profile=false", "log.progress=false", "log.tensorboard=false"),
    *("environment.train_size=256", "environment.dev_size=8", "environment.test_size=8", "evaluate.dev_size=8"),
    *("evaluate.before_training=false", "evaluate.image_controls=false", "evaluate.shared_images_rows=1"),
)
COMPARED = ("grad_norm", "entropy", "reward")
LARGEST_DIFFERENCE = 1e-3
"""Of a metric relative to that of the CPU, in float32: kernels sum in another order."""


def engine_beside_trainer(device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """The parity gate of a tiny model: paged decoding and captured graphs beside the update's packed rows."""
    with TemporaryDirectory(prefix="fovea-doctor-") as folder:
        config = _shapes(folder, device, dtype, f"parity.prompts={PROMPTS}", f"rollout.prompts_per_step={PROMPTS}")
        reading = wait_for(measure_parity(build(config)))
    for kind in reading.kinds:
        yield f"{dtype}, {kind.kind}: {kind.tokens} tokens differ by {kind.mean_abs:.1e} on average"
    if not reading.passed:
        raise CheckFailed(parity_failure(reading))


def step_beside_cpu(device: torch.device) -> Iterator[str]:
    """Metrics of the first step of GRPO in float32 on a device, beside those on the CPU."""
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
    own: Sequence[str] = (
        *(f"run_dir={json.dumps(folder)}", f"model.device={device.type}"),
        f"model.dtype={str(dtype).removeprefix('torch.')}",
    )
    return load_config([shipped_recipe("shapes")], [*QUIET, *own, *overrides])
