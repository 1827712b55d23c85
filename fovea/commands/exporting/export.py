"""`fovea export`: write a checkpoint as a Hugging Face folder that transformers (or peft, for an adapter) can load.

The folder is written under a temporary name, loaded again and compared with the checkpoint before it is renamed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import HfApi
from numpy.typing import NDArray
from peft import LoraConfig, PeftModel
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

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
from fovea.errors import ModelError, broken_checkpoint
from fovea.models.adapter_files import ADAPTER_WEIGHTS, PARTS, tensor_name
from fovea.models.load import DTYPES, load_network, save_network
from fovea.models.model_files import save_tokenizer
from fovea.models.plain import plain_logprobs
from fovea.models.processor import Processor, load_processor, template_with_defaults
from fovea.models.render import Renderer
from fovea.models.trainable import ADAPTER, lora_layers, merged_weights
from fovea.report.about import SUMMARY_FILE
from fovea.report.summary import read_summary
from fovea.run.checkpoint import STATE
from fovea.train.packing import pack_row
from fovea.types import Prompt
from fovea_gym.errors import ConfigError, DataError
from fovea_gym.rows.images import ImageOpener
from fovea_gym.types import ImageRef, Message
from fovea_gym.utils.bounded import read_file
from fovea_gym.utils.files import atomic_folder

# A different summation order changes log-probs by 1e-5 in float32. In bfloat16 it changes those of 30 layers by .11
# (root mean square), and single tokens by .27; two swapped projections or another image processing, by .9 and more.
MAX_LOGPROB_RMS = {torch.float32: 5e-4, torch.bfloat16: 0.3}
"""Largest allowed root mean square of the log-prob differences over an answer's tokens, by weight dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reloaded:
    """An exported folder, opened again by transformers (and peft)."""

    network: PreTrainedModel
    processor: Processor


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A prompt with an image, and an answer whose log-probs under two models are compared."""

    prompt: Prompt
    token_ids_T: NDArray[np.int64]


def make_probe(processor: Processor, settings: Model) -> Probe:
    """Make a probe with a noise image from a fixed seed."""
    # not a multiple of the patch size, so that the image processor must resize and its settings are tested too
    noise = np.random.default_rng(0).integers(0, 256, (99, 187, 3), dtype=np.uint8)
    opener = ImageOpener(max_image_mib=1, max_image_megapixels=1)  # both limits are above what the noise image needs
    renderer = Renderer(processor, opener, min_pixels=settings.min_pixels, max_pixels=settings.max_pixels)
    question = "What is in this picture, and how many of them are there?"
    message = Message(role="user", parts=(ImageRef(source=noise), question))
    return Probe(
        prompt=renderer.prompt([message], where="the probe"),
        token_ids_T=np.asarray(renderer.target("Two red circles and a square: \\boxed{3}."), dtype=np.int64),
    )


@torch.no_grad()
def our_logprobs(model: OpenedModel, probe: Probe) -> Tensor:
    """Log-probs [T] of the probe's answer by the trainer's forward pass."""
    device = model.vlm.device
    row = pack_row(model.vlm.family, [probe.prompt], [[probe.token_ids_T]], device)
    return model.vlm(row, temperature=1.0, chunk_tokens=row.num_actions).logprobs_A.cpu()  # type: ignore[no-any-return]


@torch.no_grad()
def reloaded_logprobs(reloaded: Reloaded, probe: Probe, device: torch.device) -> Tensor:
    """Log-probs [T] of the probe's answer by transformers' forward pass, which computes positions and masks itself."""
    network: Any = reloaded.network.to(device)  # type: ignore[arg-type]
    prompt_ids_L, answer_ids_T = (
        torch.from_numpy(ids).to(device) for ids in (probe.prompt.token_ids_L, probe.token_ids_T)
    )
    family, banned_ids = reloaded.processor.family, reloaded.processor.banned_ids
    return plain_logprobs(network, family, banned_ids, prompt_ids_L, probe.prompt.images, answer_ids_T).cpu()


def check(model: OpenedModel, reloaded: Reloaded, probe: Probe, *, merged: bool) -> float:
    """Largest log-prob difference of the reloaded folder; ModelError if it differs, with `merged` also in weights."""
    # cheap and specific checks first, to report a wrong weight or token as such and not as a log-prob difference
    different = None
    if merged:
        different = _different_weights(model.vlm.network, reloaded.network)
        different = different or _different_prompt(probe, reloaded.processor)
    if different is None and model.processor.stop_ids != reloaded.processor.stop_ids:
        different = f"its end tokens are {reloaded.processor.stop_ids}, not {model.processor.stop_ids}"
    if different is None and merged:
        different = _different_bans(model.vlm.banned_ids, reloaded)
    difference = 0.0
    if different is None:
        device = model.vlm.device
        differences_T = our_logprobs(model, probe) - reloaded_logprobs(reloaded, probe, device)
        difference = float(differences_T.abs().max())
        different = beyond_rounding(differences_T, DTYPES[model.config.model.dtype])
    if different is not None:
        raise ModelError(
            f"the exported model, loaded again, differs from the checkpoint: {different}; nothing was written. This "
            "is a bug: please report it with the run's config.yaml"
        )
    return difference


def beyond_rounding(differences_T: Tensor, dtype: torch.dtype) -> str | None:
    """Describe a log-prob difference beyond rounding of this dtype; None if there is none."""
    rms = float(differences_T.square().mean().sqrt())
    # `not <=` and not `>`: a NaN is a difference
    if not rms <= MAX_LOGPROB_RMS[dtype]:
        return f"the log-probs of the probe differ by {rms:.3g} (root mean square)"
    return None


def _different_weights(network: PreTrainedModel, reloaded: PreTrainedModel) -> str | None:
    wanted, found = dict(merged_weights(network)), dict(reloaded.named_parameters())
    if wanted.keys() != found.keys():
        return f"its weights have different names, first {min(wanted.keys() ^ found.keys())}"
    first = next((name for name in wanted if not torch.equal(wanted[name].cpu(), found[name].cpu())), None)
    return None if first is None else f"the weight {first} has different values"


def _different_bans(banned_ids: Sequence[int], reloaded: Reloaded) -> str | None:
    """Describe banned ids of the folder (for transformers' generate or Fovea's processor) that differ from the run."""
    assert reloaded.network.generation_config is not None
    read = {
        "its processor bans": reloaded.processor.banned_ids,
        "its generation config suppresses": reloaded.network.generation_config.suppress_tokens or (),
    }
    different = next((name for name, ids in read.items() if set(ids) != set(banned_ids)), None)
    return None if different is None else f"{different} different token ids than the run"


def _different_prompt(probe: Probe, reloaded: Processor) -> str | None:
    again = make_probe(reloaded, Model(path=reloaded.name))
    pairs: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {
        "tokens of a prompt": (probe.prompt.token_ids_L, again.prompt.token_ids_L),
        "tokens of an answer": (probe.token_ids_T, again.token_ids_T),
        **{
            f"{name} of an image": (tensor, again.prompt.images[0].tensors[name])
            for name, tensor in probe.prompt.images[0].tensors.items()
        },
    }
    different = next((name for name, pair in pairs.items() if not np.array_equal(*pair)), None)
    return None if different is None else f"the {different} differ"


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

    `overrides` replace settings of the run, such as the path of the base model or the device; `trust` allows code that
    the run's settings name, if its tiny model must be made again. ConfigError if `out` is not empty; ModelError if the
    reloaded folder differs from the checkpoint, in which case nothing is written.
    """
    check_empty(out)
    target = find_checkpoint(source)
    model = open_checkpoint(target, overrides, trust=trust)
    if adapter_only and model.config.model.lora is None:
        raise ConfigError(f"{target.name} has no adapter (model.lora) to export separately; export the whole model")
    if adapter_only and model.config.model.tiny is not None:
        raise ConfigError(
            f"the model under the adapter of {target.name} was made by model.tiny, so there is no folder that "
            "a separate adapter could refer to; export the whole model"
        )
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
        (folder / "README.md").write_text(_card(target, model, exported), encoding="utf-8", errors="replace")
    return exported


def push(folder: Path, repo: str) -> str:
    """Upload a folder to a Hub repository and return its URL; a new repository is private."""
    try:
        api = HfApi()
        url = api.create_repo(repo, private=True, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload by fovea export")
    except (OSError, ValueError) as error:  # base classes of all errors in huggingface_hub
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
        raise ConfigError(f"{out}: exists and is not an empty folder; export to another one")


def write_model(folder: Path, model: OpenedModel) -> None:
    """Write the weights with adapters merged, config, tokenizer with chat template, and image processor."""
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
    """Write the base folder's video processor, or one of the family's class with this model's patch sizes."""
    # Without this file AutoProcessor derives a video processor from the image processor: it has Qwen2-VL's class for
    # any model, and the pixel limit of one image for a whole video.
    base = Path(model.config.model.path or "", VIDEO_PROCESSOR_FILE)
    if model.config.model.path is not None and base.is_file():
        # in the Hub's cache, a snapshot consists of links into the folder of its repository
        snapshot = base.parent.resolve()
        root = snapshot.parents[1] if snapshot.parent.name == "snapshots" else snapshot
        (folder / VIDEO_PROCESSOR_FILE).write_bytes(read_file(base, within=root))
        return
    shared = {key: image_processor[key] for key in _SHARED_PROCESSOR_KEYS}
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
    """Load the exported folder with transformers' Auto classes."""
    settings = Model(path=str(folder), dtype=model.config.model.dtype, family=model.config.model.family)
    return Reloaded(network=load_network(settings), processor=load_processor(settings))


def reload_adapter(folder: Path, model: OpenedModel) -> Reloaded:
    """Load the base model again, and apply the exported adapter with peft."""
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
    """Number of RL steps before a checkpoint."""
    try:
        return int(json.loads(read_file(target.folder / STATE, within=target.folder))["step"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(f"{target.folder}: {broken_checkpoint(error)}") from error
