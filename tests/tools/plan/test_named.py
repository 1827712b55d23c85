"""Plans of named families beside the Qwens: activations that autograd keeps, parameters, and a run's plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fovea.models.vlm import VLM
from fovea_gym.errors import ConfigError
from fovea_tools.families.tiny import KINDS, save_tiny_kind
from fovea_tools.plan.model_sizes import model_sizes
from fovea_tools.plan.plan import make_plan
from tests.hub_models import Loaded, needs_image_processors
from tests.tiny_models import CORPUS, image, user
from tests.tools.plan.saved import GROUPS, config_for, measured_and_planned

pytestmark = needs_image_processors

TEXT = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 4}
VISION = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
TOLERANCES = dict.fromkeys(("internvl", "idefics3", "smolvlm", "mistral3", "glm4v", "glm4v_moe"), 0.1)
TOLERANCES["llava_onevision"] = 0.5
"""LLaVA-OneVision's visual tokens leave out the padding of tiles, and a plan counts whole tiles."""


def wide(kind: str, folder: Path) -> Path:
    """A model whose activations are more than its rotary positions and statistics."""
    made = KINDS[kind]
    of_glm = {"out_hidden_size": 256, "num_heads": 4} if kind.startswith("glm4v") else {}
    with pytest.MonkeyPatch.context() as patch:
        # the dense first layer of GLM is planned as one of experts, which have about its width in published models
        of_experts = {"moe_intermediate_size": 256} if kind == "glm4v_moe" else {}
        text, vision = {**TEXT, **made.text, **of_experts}, {**VISION, **made.vision, **of_glm}
        patch.setitem(KINDS, kind, replace(made, text=text, vision=vision))
        return save_tiny_kind(kind, folder, CORPUS)


@pytest.mark.parametrize("kind", TOLERANCES)
def test_saved_activations_are_those_that_autograd_keeps(kind: str, tmp_path: Path) -> None:
    loaded = Loaded.of(wide(kind, tmp_path))
    vlm = VLM(loaded.network.train(), loaded.processor.banned_ids)
    prompts = [loaded.renderer.prompt(user(image(seed, 64, 64), "How many circles?")) for seed in range(GROUPS)]
    measured, planned = measured_and_planned(vlm, prompts, tmp_path)
    assert planned == pytest.approx(measured, rel=TOLERANCES[kind])
    config = config_for(tmp_path, prompts[0].num_tokens, prompts[0].images[0].num_tokens)
    sizes = model_sizes(config)
    assert sizes.parameters == sum(parameter.numel() for parameter in loaded.network.parameters())
    assert make_plan(config).compute[-1].flops > 0


def test_a_family_without_a_fast_path_is_refused(tmp_path: Path) -> None:
    save_tiny_kind("gemma3", tmp_path, CORPUS)
    with pytest.raises(ConfigError, match=r"transformers' own forward, whose memory `fovea plan` cannot estimate; set"):
        model_sizes(config_for(tmp_path, 30, 9))
