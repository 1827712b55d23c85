from types import SimpleNamespace

import pytest

from fovea.models.families.qwen_vl import Qwen2VL, Qwen3VL, Qwen25VL, QwenVL
from fovea.types import PromptImage


@pytest.mark.parametrize(
    ("family", "frame"),
    [(Qwen2VL, (1000, 1000)), (Qwen25VL, (112, 56)), (Qwen3VL, (1000, 1000))],
)
def test_width_and_height_in_which_a_family_points(family: type[QwenVL], frame: tuple[int, int]) -> None:
    vision = SimpleNamespace(spatial_merge_size=2, patch_size=14)
    model = family.of(SimpleNamespace(vision_config=vision, image_token_id=0))
    image = PromptImage(key="", tensors={}, num_tokens=8, grid=(1, 4, 8))
    assert model.box_frame(image) == frame
