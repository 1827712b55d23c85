"""transformers' processor of a model, without its video processor: text and tensors of one image at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from fovea.errors import ModelError
from fovea.types import PromptImage
from fovea.utils.config_keys import optional_file
from fovea_gym.rows.images import Size
from fovea_gym.utils.bounded import read_file

FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
TEXT = "image_text"
"""Name of the tensor with the text that the processor writes for an image: UTF-8, uint8 [bytes]."""
ROW = "row."
"""Prefix of the name of a tensor to which the processor adds a first axis of rows, before the images of a row."""
PER_TOKEN = ("token_type_ids", "mm_token_type_ids")
"""Arguments of a model's forward that mark the visual tokens."""
NO_INPUTS = ("input_ids", "attention_mask", "text_replacement_offsets", *PER_TOKEN)

Tensors = Mapping[str, NDArray[Any]]


class HubProcessor:
    """Processes single images as transformers' processor does within a prompt; used in place of an image processor."""

    def __init__(self, processor: Any, path: str, revision: str) -> None:
        self._processor, self._path, self._revision = processor, path, revision
        self.image_token: str = processor.image_token
        pictures = [Image.new("RGB", size) for size in ((64, 64), (96, 64))]
        two = self.inputs(2 * self.image_token, pictures, return_text_replacement_offsets=True)
        if "text_replacement_offsets" not in two:
            raise ModelError(
                f"model.path={path}: transformers' {type(processor).__name__} does not return the text with which it "
                "replaces an image's mark, which model.family=auto needs; add a family for it (docs/extending.md)"
            )
        # with two images in one row, a first axis of length 1 is the axis of rows
        self._nested = {name for name, x in two.items() if name not in NO_INPUTS and len(x) == 1}

    def __call__(self, images: Sequence[Image.Image], **_options: object) -> dict[str, NDArray[Any]]:
        """Tensors of an image by forward argument, the text that replaces its mark, and that text's `input_ids`."""
        out = self.inputs(self.image_token, images, return_text_replacement_offsets=True)
        (replaced,) = out["text_replacement_offsets"][0]
        tensors = {(ROW if name in self._nested else "") + name: x for name, x in out.items() if name not in NO_INPUTS}
        text = np.frombuffer(replaced["replacement"].encode(), dtype=np.uint8)
        return {**tensors, TEXT: text, "input_ids": np.asarray(out["input_ids"])}

    def inputs(self, text: str, images: Sequence[Image.Image], **options: object) -> dict[str, Any]:
        """Outputs of the processor for a text that a chat template wrote, with its images."""
        given: Any = {"images": list(images)} if images else {}
        out = self._processor(text=[text], add_special_tokens=False, return_tensors="np", **given, **options)
        return dict(out)

    def num_tokens(self, size: Size) -> int:
        """Number of tokens of an image of this size in pixels; 1 if the processor does not know it beforehand."""
        width, height = size
        count = getattr(self._processor, "_get_num_multimodal_tokens", None)
        return 1 if count is None else int(count(image_sizes=[(height, width)])["num_image_tokens"][0])

    def save_pretrained(self, folder: Path) -> None:
        """Copy the model's processor files to a folder."""
        for name in FILES:
            if (file := optional_file(self._path, name, self._revision)) is not None:
                (folder / name).write_bytes(read_file(file))


def prompt_image(processed: Mapping[str, Any], num_tokens: int, grid: tuple[int, int, int]) -> PromptImage:
    """Record of one image, from the output of a `HubProcessor`."""
    tensors = {name: np.ascontiguousarray(x) for name, x in processed.items() if name != "input_ids"}
    key = hashlib.blake2b(digest_size=16)
    for name, x in tensors.items():
        key.update(f"{name}{x.shape}".encode() + x.tobytes())
    return PromptImage(key=key.hexdigest(), tensors=tensors, num_tokens=num_tokens, grid=grid)


def processor_class(config: Any, path: str) -> Any:
    """transformers' processor class for a config; ModelError if there is none. `path` is for messages."""
    mapping: Mapping[type, Any] = PROCESSOR_MAPPING
    kind = mapping.get(type(config), None)
    if kind is None:
        raise ModelError(f"model.path={path}: transformers has no processor for {config.model_type}")
    return kind


def load_hub_processor(kind: Any, path: str, revision: str) -> HubProcessor:
    """The processor, of this class, of a model folder or hub id; ModelError if it does not accept images."""
    try:
        processor = _processor(kind, path, revision)
    except ImportError as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelError(f"model.path={path}: {reason}; install that package, or give another model") from error
    if not getattr(processor, "image_token", None):
        raise ModelError(f"model.path={path}: transformers' {kind.__name__} has no mark for an image in a text")
    return HubProcessor(processor, path, revision)


def _processor(kind: Any, path: str, revision: str) -> Any:
    """A processor of this class without its video processor, which needs torchvision."""
    options = {"revision": revision, "trust_remote_code": False}
    parts: dict[str, Callable[[], Any]] = {
        "tokenizer": lambda: AutoTokenizer.from_pretrained(path, **options),
        "image_processor": lambda: AutoImageProcessor.from_pretrained(path, backend="pil", **options),
    }
    made = [parts.get(name, lambda: None)() for name in kind.get_attributes()]
    settings, _ = kind.get_processor_dict(path, **options)
    without_videos: Any = type(kind.__name__, (kind,), {"check_argument_for_proper_class": _accept})
    return without_videos.from_args_and_dict(made, settings)


def _accept(_processor: object, _name: str, _part: object) -> None:
    """Accept None for a video processor."""
