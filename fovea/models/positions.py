"""M-RoPE positions of a prompt, as transformers' `get_rope_index` gives them for text and still images.

Axes: `L` tokens of the prompt, 3 = time, height, width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def prompt_positions(
    token_ids_L: NDArray[np.int64],
    grids_thw: Sequence[tuple[int, int, int]],
    *,
    image_pad_id: int,
    merge_size: int,
) -> tuple[NDArray[np.int64], int]:
    """Positions [3, L] and the position of the first completion token.

    Text rises by one on all axes; an image keeps time still and spreads height and width over its merged grid;
    the text after it goes on at the largest position so far plus one (Qwen2-VL, arXiv 2409.12191, section 2.1).
    """
    pieces: list[NDArray[np.int64]] = []
    start, token = 0, 0
    is_pad_L = token_ids_L == image_pad_id
    for grid in grids_thw:
        text = int(np.argmax(is_pad_L[token:]))
        assert is_pad_L[token + text], f"{len(grids_thw)} images, but no image pad left after token {token}"
        pieces += [_text(start, text), _image(start + text, grid, merge_size)]
        token += text + pieces[-1].shape[1]
        start += text + max(grid[1], grid[2]) // merge_size
    pieces.append(_text(start, len(token_ids_L) - token))
    return np.concatenate(pieces, axis=1), start + len(token_ids_L) - token


def _text(start: int, length: int) -> NDArray[np.int64]:
    return np.broadcast_to(np.arange(start, start + length), (3, length))


def _image(start: int, grid_thw: tuple[int, int, int], merge_size: int) -> NDArray[np.int64]:
    time, height, width = grid_thw[0], grid_thw[1] // merge_size, grid_thw[2] // merge_size
    return np.indices((time, height, width), dtype=np.int64).reshape(3, -1) + start
