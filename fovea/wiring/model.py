"""Builders of the model: its folder, its network, which only the first process reads from disk, and its kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from fovea.config.model import Model
from fovea.config.run import Config
from fovea.data.bad_rows import with_skip
from fovea.models.decoder import TORCH_KERNELS, Kernels, kernels_refusal
from fovea.models.heads import ValueHead
from fovea.models.load import empty_network, load_network, pick_device
from fovea.models.modules import config_of, family_of_network
from fovea.models.plain import PlainVLM
from fovea.models.policy_network import PolicyNetwork
from fovea.models.recompute import recompute_activations, recompute_plainly
from fovea.models.tiny import make_tiny, save_tiny
from fovea.models.trainable import choose_trainable
from fovea.models.trials import why_refused
from fovea.models.vision.feature_cache import FeatureCache
from fovea.models.vlm import VLM
from fovea.rollout.embedded.tuning import decoding_note
from fovea.run.run_dir import has_checkpoint
from fovea.train.ranks import ALONE, Ranks
from fovea.utils.installing import pip_install
from fovea.wiring.model_trial import try_model
from fovea_gym.environments.base import Environment
from fovea_gym.errors import ConfigError, DataError


def load_on_ranks(settings: Model, device: torch.device, ranks: Ranks) -> PreTrainedModel:
    """Load the network of `model.path` on every rank; all ranks must make this call.

    The first rank has it on the CPU, where `load_network` reads it; the other ranks get copies on `device`. An error on
    one rank is raised on all.
    """
    if ranks.mesh is None:
        return load_network(settings)
    made: list[PreTrainedModel] = []
    ranks.run_on_each(lambda: made.append((load_network if ranks.is_first else empty_network)(settings)))
    if ranks.is_first:
        _send(made[0], device, ranks)
    else:
        _fill(made[0], device, ranks)
    return made[0]


def _send(network: PreTrainedModel, device: torch.device, ranks: Ranks) -> None:
    # tied parameters are sent once; buffers that no file holds, such as rotary frequencies, are sent too
    both = chain(network.named_parameters(), network.named_buffers())
    tensors = {name: tensor.detach() for name, tensor in both}
    ranks.gather([[name, list(x.shape), str(x.dtype).removeprefix("torch.")] for name, x in tensors.items()])
    for tensor in tensors.values():
        _broadcast(tensor.to(device).contiguous(), ranks)


def _fill(network: PreTrainedModel, device: torch.device, ranks: Ranks) -> None:
    """Replace the tensors of an empty network with the tensors of the first rank."""
    for name, shape, dtype in ranks.gather(None)[0]:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        _broadcast(tensor, ranks)
        path, _, leaf = name.rpartition(".")
        module: Any = network.get_submodule(path)
        setattr(module, leaf, nn.Parameter(tensor) if isinstance(getattr(module, leaf), nn.Parameter) else tensor)
    network.tie_weights()


def _broadcast(tensor: Tensor, ranks: Ranks) -> None:
    assert ranks.mesh is not None, "a single rank has nobody to send to"
    dist.broadcast(tensor, group_src=0, group=ranks.mesh.get_group())


CORPUS_ROWS = 2000
"""Number of training rows whose texts train the tokenizer of a tiny model."""
MODEL_FOLDER = "model"
"""Subfolder of a run folder for its tiny model."""
LIGER = "liger_kernel"


def locate_model(
    config: Config,
    folder: Path,
    environment: Callable[[], Environment],
    *,
    on_bad_row: Literal["error", "skip"] | None = None,
) -> Model:
    """Model settings with a `path`: as given, or of a tiny model that is written into the run folder once.

    ModelError if the trial of a given model fails. The tokenizer of a tiny model is trained on the texts of
    `environment`, which is called only then; `on_bad_row` replaces `data.on_bad_row` for these texts.
    """
    settings = config.model
    if settings.tiny is None:
        try_model(settings)
        return settings
    target = folder / MODEL_FOLDER
    # without a checkpoint the model is made again, since the settings may have changed since an earlier start
    if not (target.is_dir() and has_checkpoint(folder)):
        corpus = tokenizer_corpus(environment(), on_bad_row or config.data.on_bad_row)
        save_tiny(make_tiny(settings.tiny, corpus, config.seed), target)
    return settings.model_copy(update={"path": str(target), "tiny": None})


def open_vlm(config: Config, settings: Model, banned_ids: Sequence[int], ranks: Ranks = ALONE) -> PolicyNetwork:
    """Load a network onto its device, with the frozen parts and adapters of the config; the first rank reads it."""
    return make_vlm(config, load_on_ranks(settings, pick_device(config.model.device), ranks), banned_ids)


def make_vlm(config: Config, network: PreTrainedModel, banned_ids: Sequence[int]) -> PolicyNetwork:
    """Wrap a network for the policy, on its device, with the frozen parts and adapters of the config."""
    settings, device = config.model, pick_device(config.model.device)
    choose_trainable(network, settings, config.seed)
    if settings.fast_path != "auto" or family_of_network(network).fast_path is None:
        _check_plain(config)
        recompute_plainly(network, config.train.gradient_checkpointing)
        return PlainVLM(network, banned_ids, make_value_head(config, network)).to(device)
    text_config = config_of(network).get_text_config()
    runs = runs_liger(config, device) and liger_refusal(config, text_config, device, network.dtype) is None
    recompute_activations(network, config.train.gradient_checkpointing)
    _check_attention(settings, device)
    return VLM(
        network,
        banned_ids,
        attention=settings.attention,
        feature_cache=None if settings.trains_vision else FeatureCache(settings.feature_cache_gib * 2**30),
        kernels=liger_kernels(device) if runs else TORCH_KERNELS,
        value_head=make_value_head(config, network),
    ).to(device)


def _check_plain(config: Config) -> None:
    """ConfigError for a setting that only the fast path uses."""
    settings = config.model
    unread = {
        "train.backend.liger_kernels": config.train.backend.liger_kernels is True,
        "model.attention": settings.attention != "auto",
    }
    for name in (name for name, is_set in unread.items() if is_set):
        raise ConfigError(
            f"{name} is set, but {settings.name} runs transformers' own forward (model.fast_path="
            f"{settings.fast_path}), which does not use it; leave it out"
        )


def make_value_head(config: Config, network: PreTrainedModel) -> ValueHead | None:
    """Make the value head if PPO's value function shares the policy's trunk, else None."""
    critic = config.algorithm.critic
    if critic is None or critic.trunk == "separate":
        return None
    return ValueHead(config_of(network).get_text_config().hidden_size, detach_trunk=critic.trunk == "detached")


def _check_attention(settings: Model, device: torch.device) -> None:
    """ConfigError for an attention kernel that the device or dtype does not support."""
    if settings.attention == "merged" and device.type != "cpu":
        raise ConfigError(f"model.attention=merged is for CPUs, but the model is on {device.type}; set it to auto")
    varlen = settings.attention in ("varlen", "varlen_gathered")
    if varlen and device.type == "cuda" and settings.dtype != "bfloat16":
        raise ConfigError(
            f"model.attention={settings.attention} needs a 16-bit dtype on CUDA, but model.dtype={settings.dtype}; set "
            "model.dtype=bfloat16, or model.attention=auto"
        )


def liger_kernels(device: torch.device) -> Kernels:
    """Load Liger's kernels, an optional extra for CUDA."""
    if device.type != "cuda":
        raise ConfigError(
            f"train.backend.liger_kernels=true, but the model is on {device.type} and Liger's kernels run on CUDA "
            "only; set train.backend.liger_kernels=false, or model.device=cuda where there is one"
        )
    # imported here, since the package may be absent; the module names what to install
    kernels: Kernels = importlib.import_module("fovea.models.kernels_liger").LIGER_KERNELS
    return kernels


def has_liger() -> bool:
    """True if the package is installed."""
    return find_spec(LIGER) is not None


def runs_liger(config: Config, device: torch.device) -> bool:
    """True if Liger's kernels run on this device; with `auto`, on CUDA if they are installed."""
    setting = config.train.backend.liger_kernels
    return device.type == "cuda" and has_liger() if setting == "auto" else setting


def liger_refusal(config: Config, text_config: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Liger's kernels cannot be used here, else None; ConfigError or MissingExtraError if the setting is `true`."""
    if config.train.backend.liger_kernels is True:
        liger_kernels(device)
    # imported within the trial, since the import of an installed package may fail as well
    return why_refused(lambda: kernels_refusal(liger_kernels(device), text_config, device, dtype))


def kernel_notes(config: Config, vlm: PolicyNetwork) -> tuple[str, ...]:
    """A line for each choice of kernels, and for each refusal with its reason and the replacement; none on CPUs."""
    if not isinstance(vlm, VLM) or vlm.device.type == "cpu":
        return ()
    runs = runs_liger(config, vlm.device)
    refusal = liger_refusal(config, vlm.text_config, vlm.device, vlm.dtype) if runs else None
    is_named = refusal is not None or config.train.backend.liger_kernels == "auto"
    chosen = [liger_note(runs, refusal)] if is_named else []
    if config.rollout.engine.shares_weights:
        chosen.append(decoding_note(vlm.text_config, vlm.device, vlm.dtype))
    return (*chosen, *(f"slow: {note}" for note in vlm.slow_kernels()))


def liger_note(runs: bool, refusal: str | None = None) -> str:
    """Note that Liger's kernels run, or why they do not."""
    if runs and refusal is None:
        return "train.backend.liger_kernels=auto: Liger's kernels run RMS norm, SwiGLU and rotary positions"
    assert runs or not has_liger(), "Liger is installed, but does not run on this GPU"
    slower = "torch's operators make more passes over memory for RMS norm, SwiGLU and rotary positions"
    if refusal is None:
        return f"slow: train.backend.liger_kernels=auto: {LIGER} is not installed, and {slower}; {pip_install('liger')}"
    fix = "train.backend.liger_kernels=false leaves out the trial"
    return f"slow: Liger's kernels are not used ({refusal}), and {slower}; {fix}"


def tokenizer_corpus(environment: Environment, on_bad_row: Literal["error", "skip"]) -> list[str]:
    """Questions and answers of the first training rows, to train a tokenizer on."""
    tasks = environment.tasks("train")
    texts: list[str] = []
    for index in range(min(len(tasks), CORPUS_ROWS)):
        try:
            texts += [tasks[index].question, *environment.demonstration(tasks[index])]
        except DataError as error:
            if on_bad_row == "error":
                raise with_skip(error) from error  # the run reports other bad rows when its data order reaches them
    return texts
