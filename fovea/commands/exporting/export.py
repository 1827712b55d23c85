"""`fovea export`: a checkpoint as a Hugging Face folder that transformers (or peft, for an adapter) loads.

The folder is written under a temporary name, loaded again and compared with the checkpoint before it is renamed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from peft import LoraConfig, PeftModel
from safetensors.torch import save_file

from fovea.commands.exporting.check import Reloaded, check, make_probe
from fovea.commands.exporting.model_card import REPOSITORY_ID, Card, model_card
from fovea.commands.targets import (
    RECIPE_FILE,
    CheckpointTarget,
    OpenedModel,
    find_checkpoint,
    naming_deletion,
    open_checkpoint,
)
from fovea.config.loading import dump_config
from fovea.config.model import Model
from fovea.config.recipes import Override
from fovea.errors import ConfigError, DataError, ModelError, broken_checkpoint
from fovea.models.adapter_files import ADAPTER_WEIGHTS, PARTS, tensor_name
from fovea.models.load import load_network, save_network
from fovea.models.model_files import save_tokenizer
from fovea.models.processor import load_processor, template_with_defaults
from fovea.models.trainable import ADAPTER, lora_layers
from fovea.report.about import SUMMARY_FILE
from fovea.report.summary import read_summary
from fovea.run.checkpoint import STATE
from fovea.utils.bounded import read_file
from fovea.utils.files import atomic_folder

CARD_FILE = "README.md"
VIDEO_PROCESSOR_FILE = "video_preprocessor_config.json"
_SHARED_PROCESSOR_KEYS = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The folder that was written and the result of its verification."""

    folder: Path
    adapter_only: bool
    max_logprob_difference: float
    """Largest log-prob difference between the checkpoint and the reloaded folder, on a probe."""
    left_out: tuple[str, ...]
    """Folders and tensors of the checkpoint that are not exported: those of a value function."""


def export(
    source: Path, out: Path, *, adapter_only: bool = False, overrides: Sequence[Override] = (), trust: bool = False
) -> Exported:
    """Write the model of a run or checkpoint to the folder `out`.

    `overrides` replace settings of the run, such as the path of the base model or the device; `trust` lets code run
    that the run's settings name, should its tiny model have to be made again. ConfigError when `out` is
    not empty; ModelError when the reloaded folder differs from the checkpoint, in which case nothing is written.
    """
    check_empty(out)
    target = find_checkpoint(source)
    model = open_checkpoint(target, overrides, trust=trust)
    if adapter_only:
        _check_adapter(model, target)
    probe = make_probe(model.processor, model.config.model)
    with naming_deletion(target.folder), atomic_folder(out) as folder:
        write = write_adapter if adapter_only else write_model
        write(folder, model)
        reload = reload_adapter if adapter_only else reload_model
        difference = check(model, reload(folder, model), probe, merged=not adapter_only)
        exported = Exported(
            folder=out, adapter_only=adapter_only, max_logprob_difference=difference, left_out=model.left_out
        )
        (folder / RECIPE_FILE).write_text(dump_config(model.config), encoding="utf-8")
        (folder / CARD_FILE).write_text(_card(target, model, exported), encoding="utf-8", errors="replace")
    return exported


def push(folder: Path, repo: str) -> str:
    """Upload a folder to a hub repository and return its URL; a new repository is created private."""
    try:
        api = HfApi()
        url = api.create_repo(repo, private=True, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload by fovea export")
    except (OSError, ValueError) as error:  # base classes of all errors of huggingface_hub
        reason = str(error).strip().split("\n")[0]
        raise ModelError(
            f"--push {repo}: {reason}; {folder} is complete: upload it with `hf upload {repo} {folder}`"
        ) from error
    return str(url)


def check_repo(repo: str) -> None:
    """ConfigError for an invalid repository name, raised before any work is done."""
    if not REPOSITORY_ID.fullmatch(repo):
        raise ConfigError(f"--push {repo}: not a valid repository name; use ORG/NAME")


def check_empty(out: Path) -> None:
    """ConfigError for a folder that a model cannot be exported to, raised before any work is done."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: it exists and is not an empty folder; export to another one")


def _check_adapter(model: OpenedModel, target: CheckpointTarget) -> None:
    if model.config.model.lora is None:
        raise ConfigError(
            f"{target.name} trained no adapter (model.lora) that could be exported by itself; export the whole model"
        )
    if model.config.model.tiny is not None:
        raise ConfigError(
            f"the model under the adapter of {target.name} was created by model.tiny and is in no folder that an "
            "adapter by itself could refer to; export the whole model"
        )


def write_model(folder: Path, model: OpenedModel) -> None:
    """Write weights with adapters merged, config, tokenizer with the chat template, and image processor."""
    save_network(model.vlm, folder)
    processor, settings = model.processor, model.config.model
    processor.tokenizer.chat_template = template_with_defaults(processor)
    save_tokenizer(processor.tokenizer, folder)
    # the pixel limits of training, so that inference elsewhere sees images of the same size
    image_processor = processor.image_processor
    options = processor.family.image_options(image_processor, settings.min_pixels, settings.max_pixels)
    if options:
        own = {key: x for key, x in image_processor.to_dict().items() if key not in ("min_pixels", "max_pixels")}
        image_processor = type(image_processor).from_dict(own | dict(options))
    image_processor.save_pretrained(folder)
    if model.vlm.family.video_processor is not None:
        _write_video_processor(folder, model, image_processor.to_dict())


def _write_video_processor(folder: Path, model: OpenedModel, image_processor: Mapping[str, Any]) -> None:
    """Write the video processor of the base folder, else one of the family's class with this model's patch sizes."""
    # Without this file AutoProcessor derives a video processor from the image processor: of Qwen2-VL's class, whatever
    # the model, and with the pixel limit of one image for a whole video.
    base = Path(model.config.model.path or "", VIDEO_PROCESSOR_FILE)
    if model.config.model.path is not None and base.is_file():
        # the hub's cache holds a snapshot as links into the folder of its repository
        snapshot = base.parent.resolve()
        root = snapshot.parents[1] if snapshot.parent.name == "snapshots" else snapshot
        (folder / VIDEO_PROCESSOR_FILE).write_bytes(read_file(base, within=root))
        return
    shared = {key: image_processor[key] for key in _SHARED_PROCESSOR_KEYS if key in image_processor}
    written = json.dumps({"video_processor_type": model.vlm.family.video_processor, **shared}, indent=2)
    (folder / VIDEO_PROCESSOR_FILE).write_text(written + "\n", encoding="utf-8")


def write_adapter(folder: Path, model: OpenedModel) -> None:
    """Write the LoRA adapter in peft's format; tokenizer and image processor remain those of the base model."""
    settings, layers = model.config.model, lora_layers(model.vlm.network)
    assert settings.lora is not None, "the run has no adapter"
    LoraConfig(
        r=settings.lora.rank,
        lora_alpha=settings.lora.alpha,
        # full module names: suffixes such as q_proj would also match layers of the vision tower
        target_modules=sorted(layers),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=settings.path,
        revision=settings.revision,
        inference_mode=True,
    ).save_pretrained(str(folder))
    tensors = {
        tensor_name(name, part): getattr(layer, part)[ADAPTER].weight.detach().cpu().contiguous()
        for name, layer in layers.items()
        for part in PARTS
    }
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def reload_model(folder: Path, model: OpenedModel) -> Reloaded:
    """The exported folder loaded by transformers' Auto classes."""
    settings = Model(path=str(folder), dtype=model.config.model.dtype, family=model.config.model.family)
    return Reloaded(network=load_network(settings), processor=load_processor(settings))


def reload_adapter(folder: Path, model: OpenedModel) -> Reloaded:
    """The base model, loaded afresh, with the exported adapter applied by peft."""
    adapted: Any = PeftModel.from_pretrained(load_network(model.config.model), str(folder))
    return Reloaded(network=adapted, processor=load_processor(model.config.model))


def _card(target: CheckpointTarget, model: OpenedModel, exported: Exported) -> str:
    summary = target.run / SUMMARY_FILE
    return model_card(
        Card(
            name=exported.folder.name,
            step=step_of(target),
            config=model.config,
            summary=read_summary(summary) if summary.is_file() else None,
            adapter_only=exported.adapter_only,
            model_class=type(model.vlm.network).__name__,
            max_logprob_difference=exported.max_logprob_difference,
            left_out=exported.left_out,
            banned_ids=model.processor.banned_ids,
        )
    )


def step_of(target: CheckpointTarget) -> int:
    """Number of RL steps of a checkpoint."""
    try:
        return int(json.loads(read_file(target.folder / STATE, within=target.folder))["step"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(f"{target.folder}: {broken_checkpoint(error)}") from error
