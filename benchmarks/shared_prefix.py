"""CPU time of an update with shared prompts compared with the plain path, for a tiny Qwen3.5 or another family.

    OMP_NUM_THREADS=1 python -m benchmarks.shared_prefix --family qwen3_5

An update has one prompt with one image and n completions, in one process and one micro-batch. It includes forward and
backward pass, gradient norm and AdamW. The plain path is transformers' forward on n rows, each with a copy of the
prompt and the image.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.printing import as_table, show
from fovea.config.algorithm import Algorithm
from fovea.config.model import TinyModel
from fovea.config.sections import Train
from fovea.models.plain import PlainVLM
from fovea.models.policy_network import PolicyNetwork
from fovea.models.render import Renderer
from fovea.models.tiny import FixedSizes, TinyParts, make_tiny
from fovea.models.vlm import VLM
from fovea.train.torch.policy import TorchPolicy
from fovea.types import Batch, Prompt, Sample, SampleGroup
from fovea_gym.rows.images import ImageOpener
from fovea_gym.types import ImageRef, Message

SIZES = {
    "hidden_size": 256,
    "num_layers": 8,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "vocabulary_size": 1024,
}
FIXED = FixedSizes(vision_hidden_size=128, vision_depth=4, vision_heads=4, init_std=0.04)
WARM, TIMED = 1, 3


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of tokens of a group."""

    prompt: int
    visual: int
    completions: int
    tokens: int


SHAPES = (Shape(186, 144, 8, 48), Shape(318, 256, 16, 32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="qwen3_5")
    family = parser.parse_args().family
    torch.set_num_threads(1)
    rows = []
    for shape in SHAPES:
        plain, shared = (update_seconds(kind, family, shape) for kind in (PlainVLM, VLM))
        sizes = (str(each) for each in (shape.prompt, shape.completions, shape.tokens))
        rows.append([*sizes, f"{plain:.2f}", f"{shared:.2f}", f"{plain / shared:.1f}x"])
    headers = ["prompt tokens", "completions", "tokens of each", "plain, CPU s", "shared, CPU s", "ratio"]
    show(as_table(f"An update of {family}: fastest of {TIMED}", headers, rows, num_left=0))


def update_seconds(kind: type[PolicyNetwork], family: str, shape: Shape) -> float:
    """The CPU seconds of the fastest of TIMED updates."""
    parts = make_tiny(TinyModel.model_validate({**SIZES, "family": family}), [], 0, FIXED)
    policy = TorchPolicy(
        kind(parts.network, parts.processor.banned_ids),
        train=Train(max_tokens_per_microbatch=10**6),
        algorithm=Algorithm(),
        temperature=1.0,
        max_steps=100,
    )
    batch = group_of(parts, shape)
    seconds = []
    for _ in range(WARM + TIMED):
        start = time.process_time()
        policy.update(batch)
        seconds.append(time.process_time() - start)
    return min(seconds[WARM:])


def group_of(parts: TinyParts, shape: Shape) -> Batch:
    """Make one group with these numbers of tokens, from random pixels and token ids."""
    rng = np.random.default_rng(0)
    side = math.isqrt(shape.visual) * 2 * FIXED.patch_size_px
    picture = ImageRef(source=rng.integers(0, 255, (side, side, 3), dtype=np.uint8))
    rendered = Renderer(parts.processor, ImageOpener(max_image_mib=1, max_image_megapixels=4)).prompt(
        [Message(role="user", parts=(picture,))]
    )
    filling = rng.integers(0, 250, shape.prompt - rendered.num_tokens)
    prompt = Prompt(
        token_ids_L=np.concatenate([rendered.token_ids_L, filling]),
        unexpanded_ids_U=rendered.unexpanded_ids_U,
        images=rendered.images,
    )
    samples = tuple(sample(rng, shape) for _ in range(shape.completions))
    return Batch(groups=(SampleGroup(prompt=prompt, samples=samples),))


def sample(rng: np.random.Generator, shape: Shape) -> Sample:
    return Sample(
        token_ids_T=rng.integers(0, 250, shape.tokens),
        mask_T=np.ones(shape.tokens, dtype=np.bool_),
        rollout_logprobs_T=np.full(shape.tokens, -5.0, dtype=np.float32),
        reward=0.0,
        weight=1 / (shape.completions * shape.tokens),
        advantages_T=np.full(shape.tokens, rng.normal(), dtype=np.float32),
    )


if __name__ == "__main__":
    main()
