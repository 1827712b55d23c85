"""The driver holds no network: the loop and the renderer run without transformers' network classes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.tiny_models import save, tiny

DRIVER = """
import asyncio, sys
from pathlib import Path
from fovea.config.run import Model, ShapesEnvironment
from fovea.data.images import ImageOpener
from fovea.environments.shapes.environment import Shapes
from fovea.loop import take_step
from fovea.models.processor import load_processor
from fovea.models.render import Renderer
from fovea.run.lifecycle import begin, closing
from tests.fakes import bandit_run

folder = Path(sys.argv[1])
environment = Shapes(ShapesEnvironment(train_size=4, dev_size=4, test_size=4), 0)
renderer = Renderer(load_processor(Model(path=str(folder / "model"))), ImageOpener(max_mib=1, max_megapixels=1))
prompts = [renderer.prompt(environment.prompt(task)) for task in environment.tasks("train")]
assert all(prompt.images for prompt in prompts)

run = bandit_run(folder / "run")


async def one_step() -> None:
    async with closing(run):
        await take_step(run, await begin(run))


asyncio.run(one_step())
assert run.policy.updates == 1

# modeling_auto is transformers' table of class names
networks = [name for name in sys.modules if name.startswith("transformers.models.") and ".modeling_" in name]
networks = [name for name in networks if not name.endswith("modeling_auto")]
print(networks, "fovea.models.vlm" in sys.modules)
"""


def test_rendering_and_a_step_load_no_network_class(tmp_path: Path) -> None:
    save(tiny("qwen3_vl"), tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[] False"
