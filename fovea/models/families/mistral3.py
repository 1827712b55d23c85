"""The processor of Mistral 3, which transformers has as PixtralProcessor behind an import of torchvision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.processing_utils import ProcessorMixin


class RowsProcessor(ProcessorMixin):
    """Writes the visual tokens of an image in rows, with a token between two rows and another behind the last."""

    def __init__(
        self,
        image_processor: Any,
        tokenizer: Any,
        patch_size: int = 16,
        spatial_merge_size: int = 1,
        image_token: str = "[IMG]",
        image_break_token: str = "[IMG_BREAK]",
        image_end_token: str = "[IMG_END]",
        **options: Any,
    ) -> None:
        """Sizes and marks as in processor_config.json; a visual token is `spatial_merge_size` patches wide."""
        super().__init__(image_processor, tokenizer, **options)  # type: ignore[no-untyped-call]
        self.side_px = patch_size * spatial_merge_size
        self.image_token, self.row_end, self.image_end = image_token, image_break_token, image_end_token
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)

    def _process_images(self, images: Any, **options: Any) -> Any:
        # sides are rounded to whole visual tokens
        return super()._process_images(images, **options | {"patch_size": self.side_px})

    def replace_image_token(self, image_inputs: Mapping[str, Any], image_idx: int, **_options: Any) -> str:
        """Text of an image."""
        rows, columns = (int(side) // self.side_px for side in image_inputs["image_sizes"][image_idx])
        return self.row_end.join([self.image_token * columns] * rows) + self.image_end
