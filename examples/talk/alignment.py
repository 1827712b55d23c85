"""The alignment of SmolVL's vision tower with its language model.

For some pictures the training questions reveal colour and shape. For these, the tower's visual token is regressed to a
target token, with which the frozen language model captions the picture correctly (`captions.py`). There are only 24
targets, so training them takes minutes; a step of the tower takes a tenth of a second on one core. Answering questions
about such a token is not trained here: that is what RL improves.

Axes: `B` pictures, `N` descriptions, `D` width of the language model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from examples.talk.captions import COLOUR_OPENING, SHAPE_OPENING, Speaker, caption_tokens
from examples.talk.network import GRID, build_image_processor, new_tower
from fovea.models.vision.attention import run_in_segments
from fovea_tools.data_sets.easy_vqa import Contents, EasyVqaPicture

REPORT_EVERY_STEPS = 50
WARMUP_STEPS = 50
GAIN = 1.4
WEIGHT_DECAY = 0.05
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """Settings of the alignment; equal settings give an equal tower on the same machine."""

    steps: int = 2500
    batch_size: int = 64
    learning_rate: float = 1.5e-3
    """Peak learning rate of AdamW; it rises linearly and then falls to 0 along a cosine."""
    caption_steps: int = 100
    """Optimizer steps of the target tokens, which are trained before the tower."""
    caption_learning_rate: float = 0.03
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Examples:
    pixels: Tensor
    """Patches of all pictures, float32 [B, patches, values]."""
    descriptions_B: Tensor
    """The index of each picture's description."""


def align(
    train: Sequence[EasyVqaPicture],
    dev: Sequence[EasyVqaPicture],
    settings: Alignment,
    report: Callable[[str], None],
) -> dict[str, Tensor]:
    """Train a vision tower from random weights and return its weights in float16; `report` gets lines on progress.

    The last figure of a line is the share of dev pictures whose visual token is nearest to the target of their own
    description. Pictures whose contents are not known are left out.
    """
    described = sorted({picture.contents for picture in (*train, *dev) if picture.contents is not None})
    targets_ND = caption_tokens(
        Speaker(),
        described,
        steps=settings.caption_steps,
        learning_rate=settings.caption_learning_rate,
        seed=settings.seed,
        report=report,
    )
    examples, unseen = _examples(train, described, mirrored=True), _examples(dev, described)
    tower = starting_tower(targets_ND, settings.seed)
    optimizer = torch.optim.AdamW(tower.parameters(), lr=settings.learning_rate, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, settings.steps))
    rng = np.random.default_rng(settings.seed)
    for step in range(1, settings.steps + 1):
        batch_B = torch.from_numpy(rng.integers(len(examples.descriptions_B), size=settings.batch_size))
        seen_BD = _visual_tokens(tower, examples.pixels[batch_B])
        wanted_BD = targets_ND[examples.descriptions_B[batch_B]]
        loss = F.mse_loss(seen_BD, wanted_BD) / targets_ND.var()
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(tower.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        if step % REPORT_EVERY_STEPS == 0:
            read_right = _accuracy(tower, unseen, targets_ND)
            report(
                f"tower: step {step}/{settings.steps}  loss {loss.item():.3f}  dev pictures read right {read_right:.3f}"
            )
    return {name: weight.half() for name, weight in tower.state_dict().items()}


def read_share(weights: Mapping[str, Tensor], pictures: Sequence[EasyVqaPicture]) -> float:
    """The share of pictures with known contents that the language model describes correctly with this tower.

    It completes two captions: the text after `COLOUR_OPENING` must begin with the colour, and the text after
    `SHAPE_OPENING` must contain the shape.
    """
    described = sorted({picture.contents for picture in pictures if picture.contents is not None})
    tower, examples = new_tower(), _examples(pictures, described)
    tower.load_state_dict(dict(weights))
    with torch.no_grad():
        seen_BD = _visual_tokens(tower, examples.pixels)
    speaker = Speaker()
    colours, shapes = speaker.go_on(COLOUR_OPENING, seen_BD), speaker.go_on(SHAPE_OPENING, seen_BD)
    truths = [described[index] for index in examples.descriptions_B]
    # the text about the shape often names the colour first: "a red circle"
    said = zip(colours, shapes, truths, strict=True)
    return float(np.mean([colour.startswith(truth[0]) and truth[1] in shape for colour, shape, truth in said]))


def starting_tower(targets_ND: Tensor, seed: int) -> Qwen2VisionTransformerPretrainedModel:
    """Create a tower with random weights whose output is the mean target for every picture.

    Weights have a variance of GAIN^2 divided by their number of inputs (LeCun et al., Efficient BackProp, 1998, section
    4.6), so that narrow layers start outside the linear part of their activation.
    """
    tower = new_tower()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in tower.modules():
            if isinstance(module, nn.Linear | nn.Conv3d):
                module.weight.normal_(std=GAIN / math.sqrt(module.weight[0].numel()), generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
        head: Any = tower.merger.mlp[-1]
        head.weight.zero_()
        head.bias.copy_(targets_ND.mean(0))
    run_in_segments(tower)
    return tower


def _examples(
    pictures: Sequence[EasyVqaPicture], described: Sequence[Contents], *, mirrored: bool = False
) -> _Examples:
    """The pictures whose contents are known; with `mirrored`, also each of them mirrored left to right."""
    processor, pixels, descriptions = build_image_processor(), [], []
    for picture in pictures:
        if picture.contents is None:
            continue
        with Image.open(picture.file) as file:
            image = file.convert("RGB")
        for each in (image, ImageOps.mirror(image)) if mirrored else (image,):
            pixels.append(processor(images=[each], return_tensors="np")["pixel_values"])
            descriptions.append(described.index(picture.contents))
    return _Examples(pixels=torch.from_numpy(np.stack(pixels)), descriptions_B=torch.tensor(descriptions))


def _visual_tokens(tower: Qwen2VisionTransformerPretrainedModel, pixels: Tensor) -> Tensor:
    """Compute the visual token of each picture, [B, D]."""
    out: Tensor = tower(pixels.flatten(0, 1), grid_thw=torch.tensor([GRID]).expand(len(pixels), 3)).pooler_output
    return out


@torch.no_grad()
def _accuracy(tower: Qwen2VisionTransformerPretrainedModel, examples: _Examples, targets_ND: Tensor) -> float:
    nearest_B = torch.cdist(_visual_tokens(tower, examples.pixels), targets_ND).argmin(dim=1)
    return float((nearest_B == examples.descriptions_B).float().mean())


def _rate(step: int, steps: int) -> float:
    """The learning rate at a step, as a share of its peak."""
    rising = min(1.0, (step + 1) / WARMUP_STEPS)
    return rising * (1 + math.cos(math.pi * step / steps)) / 2
