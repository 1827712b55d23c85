"""Verification of an export: the reloaded folder against the checkpoint, by weights, inputs and log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from fovea.commands.targets import OpenedModel
from fovea.config.model import Model
from fovea.data.images import ImageOpener
from fovea.errors import ModelError
from fovea.models.load import DTYPES
from fovea.models.plain import plain_logprobs
from fovea.models.processor import Processor
from fovea.models.render import Renderer
from fovea.models.trainable import merged_weights
from fovea.train.packing import pack_row
from fovea.types import ImageRef, Message, Prompt

# A different summation order moves log-probs by 1e-5 in float32. In bfloat16 it moves those of 30 layers by .11 in the
# root mean square, and single tokens by .27; two exchanged projections or a differently processed image by .9 and more.
MAX_LOGPROB_RMS = {torch.float32: 5e-4, torch.bfloat16: 0.3}
"""Largest allowed root mean square of the log-prob differences of an answer's tokens, by weight dtype."""
PROBE_QUESTION = "What is in this picture, and how many of them are there?"
PROBE_SIDES_PX = (99, 187)
PROBE_ANSWER = "Two red circles and a square: \\boxed{3}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Reloaded:
    """An exported folder, opened again by transformers (and peft)."""

    network: PreTrainedModel
    processor: Processor


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A prompt with an image, and an answer, on which the log-probs of two models are compared."""

    prompt: Prompt
    token_ids_T: NDArray[np.int64]


def make_probe(processor: Processor, settings: Model) -> Probe:
    """A probe with a noise image of fixed seed."""
    # no multiple of the patch size, so that the image processor has to resize and its settings are tested too
    noise = np.random.default_rng(0).integers(0, 256, (*PROBE_SIDES_PX, 3), dtype=np.uint8)
    opener = ImageOpener(max_mib=1, max_megapixels=1)  # of which the noise needs neither
    renderer = Renderer(processor, opener, min_pixels=settings.min_pixels, max_pixels=settings.max_pixels)
    message = Message(role="user", parts=(ImageRef(source=noise), PROBE_QUESTION))
    return Probe(
        prompt=renderer.prompt([message], where="the probe"),
        token_ids_T=np.asarray(renderer.target(PROBE_ANSWER), dtype=np.int64),
    )


@torch.no_grad()
def our_logprobs(model: OpenedModel, probe: Probe) -> Tensor:
    """Log-probs [T] of the probe's answer by the trainer's forward pass."""
    device = model.vlm.device
    row = pack_row(model.vlm.family, [probe.prompt], [[probe.token_ids_T]], device)
    return model.vlm(row, temperature=1.0, chunk_tokens=row.num_actions).logprobs_A.cpu()  # type: ignore[no-any-return]


@torch.no_grad()
def reloaded_logprobs(reloaded: Reloaded, probe: Probe, device: torch.device) -> Tensor:
    """Log-probs [T] of the probe's answer by transformers' forward pass, which makes positions and masks itself."""
    network: Any = reloaded.network.to(device)  # type: ignore[arg-type]
    prompt_ids_L, answer_ids_T = (
        torch.from_numpy(ids).to(device) for ids in (probe.prompt.token_ids_L, probe.token_ids_T)
    )
    family, banned_ids = reloaded.processor.family, reloaded.processor.banned_ids
    return plain_logprobs(network, family, banned_ids, prompt_ids_L, probe.prompt.images, answer_ids_T).cpu()


def check(model: OpenedModel, reloaded: Reloaded, probe: Probe, *, merged: bool) -> float:
    """Largest log-prob difference between checkpoint and reloaded folder; ModelError naming what differs.

    With `merged` the folder holds every weight, and each must be equal bit for bit.
    """
    # cheap and specific checks first: a wrong weight or token is named as such, not as a log-prob difference
    different = None
    if merged:
        different = _different_weights(model.vlm.network, reloaded.network) or _different_prompt(
            probe, reloaded.processor
        )
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
    """Describe a log-prob difference beyond rounding of this dtype, else None."""
    rms = float(differences_T.square().mean().sqrt())
    # `not <=` and not `>`: a NaN is a difference
    if not rms <= MAX_LOGPROB_RMS[dtype]:
        return f"the log-probs of the probe are off by {rms:.3g} in the root mean square"
    return None


def _different_weights(network: PreTrainedModel, reloaded: PreTrainedModel) -> str | None:
    wanted, found = dict(merged_weights(network)), dict(reloaded.named_parameters())
    if wanted.keys() != found.keys():
        return f"its weights have other names, first {min(wanted.keys() ^ found.keys())}"
    first = next((name for name in wanted if not torch.equal(wanted[name].cpu(), found[name].cpu())), None)
    return None if first is None else f"the weight {first} has other values"


def _different_bans(banned_ids: Sequence[int], reloaded: Reloaded) -> str | None:
    """True if transformers' generate, or a processor of ours, would draw other ids from the folder than the run did."""
    assert reloaded.network.generation_config is not None
    read = {
        "its processor bans": reloaded.processor.banned_ids,
        "its generation config suppresses": reloaded.network.generation_config.suppress_tokens or (),
    }
    different = next((name for name, ids in read.items() if set(ids) != set(banned_ids)), None)
    return None if different is None else f"{different} other token ids than the run"


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
