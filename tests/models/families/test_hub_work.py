"""FLOPs of models whose prompts transformers' processor makes, against what torch counts in their forward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fovea_tools.families.tiny import KINDS, save_tiny_kind
from tests.hub_models import CHATS, Loaded, needs_image_processors
from tests.tiny_models import CORPUS

pytestmark = needs_image_processors

CLASS_TOKENS = {"internvl", "vipllava"}
"""Types whose tower has a token besides the patches of a tile, 36 here."""
NOT_COUNTED = ("rotary_emb", "rotary_pos_emb")


# Gemma 4 has matrices outside its layers, and its tower computes padding
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"gemma4"}))
def test_the_forward_pass_is_what_torch_counts(kind: str, tmp_path: Path) -> None:
    """With every score of attention computed, and experts one by one."""
    loaded = Loaded.of(save_tiny_kind(kind, tmp_path, CORPUS))
    loaded.network.set_attn_implementation("eager")
    loaded.network.set_experts_implementation("eager")
    prompt, family = loaded.prompts[1], loaded.processor.family
    given = {name: torch.as_tensor(x) for name, x in loaded.inputs(CHATS[1]).items()}
    with torch.no_grad(), FlopCounterMode(display=False, depth=10) as counter:
        loaded.network(**given, use_cache=False)
    counts = {name: sum(operations.values()) for name, operations in counter.get_flop_counts().items()}
    of = type(loaded.network).__name__
    vision = sum(counts.get(f"{of}.{path}", 0) for path in family.vision_paths)
    positions = sum(count for name, count in counts.items() if name.rsplit(".", 1)[-1] in NOT_COUNTED)
    work, tokens = family.work, prompt.num_tokens
    assert counts[f"{of}.{family.language_path}"] - positions == tokens * work.token + tokens**2 * work.pair
    assert work.images(prompt.images) == pytest.approx(vision, rel=0.03 if kind in CLASS_TOKENS else 1e-12)
