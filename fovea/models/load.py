"""Loading a Qwen-VL from a folder or hub id, and choosing what of it is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils.hub import cached_file

from fovea.config.run import Model
from fovea.errors import ModelError
from fovea.models.loaded import FAMILIES, IMAGE_PAD, ModelParts

WHOLE_MODEL = "download the whole model again, or give another folder"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pick_device(wanted: str) -> torch.device:
    """The device that `model.device` names; auto is cuda where there is one."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ModelError("model.device=cuda, but torch sees no CUDA device; set model.device=auto or cpu")
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(wanted)


def load_pretrained(settings: Model) -> ModelParts:
    """Network, tokenizer, image processor and chat template of `model.path`; ModelError when one is missing."""
    path = settings.path
    assert path is not None
    _check_folder(path, settings.revision)
    options: dict[str, Any] = {"trust_remote_code": False, "revision": settings.revision or "main"}
    try:
        config = AutoConfig.from_pretrained(path, **options)
        _check_family(path, config.model_type)
        network = _load_network(path, DTYPES[settings.dtype], options)
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
        processor = Qwen2VLImageProcessorPil.from_pretrained(path, revision=options["revision"])
        if IMAGE_PAD not in tokenizer.get_vocab():
            raise ModelError(f"model.path={path}: its tokenizer has no {IMAGE_PAD}; {WHOLE_MODEL}")
        template = _chat_template(path, options["revision"], tokenizer.chat_template)
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], chat_template=template, tokenize=False)
    except ModelError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError, TemplateError) as error:
        raise ModelError(f"model.path={path}: {_first_line(error)}; {WHOLE_MODEL}") from error
    return ModelParts(
        network=network, tokenizer=tokenizer, image_processor=processor, chat_template=template, name=path
    )


def _load_network(path: str, dtype: torch.dtype, options: dict[str, Any]) -> PreTrainedModel:
    """transformers fills weights that a file lacks with random numbers and a warning; here that is an error."""
    loaded: Any = AutoModelForImageTextToText.from_pretrained(
        path, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
    )
    network: PreTrainedModel = loaded[0]
    info = loaded[1]
    wrong = sorted({*info["missing_keys"], *(str(key) for key in info.get("mismatched_keys", ()))})
    if wrong:
        raise ModelError(
            f"model.path={path}: its weights lack {len(wrong)} tensors or have them in another size, first {wrong[0]}; "
            f"{WHOLE_MODEL}"
        )
    network.eval()
    return network


def _check_folder(path: str, revision: str | None) -> None:
    folder = Path(path)
    if folder.is_dir() and revision is not None:
        raise ModelError(
            f"model.revision={revision}, but model.path={path} is a folder, and only hub ids have revisions; set "
            "model.revision=null"
        )
    if not folder.is_dir():
        if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
            raise ModelError(
                f"model.path={path}: no such folder; give a model folder or a hub id such as Qwen/Qwen3-VL-2B-Instruct"
            )
        return
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model.path={path}: the folder has no config.json; give the folder that holds the model's files"
        )
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"model.path={path}: the folder has a config.json but no weights (*.safetensors); "
            "download the whole model, or convert its .bin files to safetensors"
        )


def _check_family(path: str, family: str) -> None:
    if family not in FAMILIES:
        raise ModelError(
            f"model.path={path}: its model_type is {family}, and Fovea trains {', '.join(FAMILIES)}; give one of these"
        )


def _chat_template(path: str, revision: str, of_tokenizer: str | None) -> str:
    """The processor's template where the model has one of its own, else the tokenizer's."""
    for name in ("chat_template.jinja", "chat_template.json"):
        file = cached_file(
            path,
            name,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if file is not None:
            text = Path(file).read_text(encoding="utf-8")
            return str(json.loads(text)["chat_template"]) if name.endswith(".json") else text
    if of_tokenizer is None:
        raise ModelError(f"model.path={path}: it has no chat template (chat_template.jinja); use an Instruct model")
    return of_tokenizer


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
