"""Hashes of tensors."""

from __future__ import annotations

import pytest
import torch

from fovea.utils.checksum import PLACE_MULTIPLIER, ROW, ROWS_AT_ONCE, bit_hash, combined, read_hashes

SIZES = (1, 7, 2 * ROW + 3, 2 * ROW * (ROWS_AT_ONCE + 1) + 5)
"""Below a word, with a part of one, and beyond one and many rows of words."""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_change_of_one_value_shows_at_every_place(size: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(size).to(dtype)
    places = {0, size // 2, size - 1}
    hashes = {int(bit_hash(tensor))}
    for place in places:
        changed = tensor.clone()
        changed[place] += 1
        hashes.add(int(bit_hash(changed)))
    assert len(hashes) == 1 + len(places)


def test_values_that_change_places_show() -> None:
    tensor = torch.randn(4, 2 * ROW)
    assert len({int(bit_hash(each)) for each in (tensor, tensor.flip(0), tensor.flip(1), -tensor, tensor.T)}) == 5


def test_the_hash_is_that_of_the_values_wherever_they_lie() -> None:
    whole = torch.randn(100, 3)
    for part in (whole[1:], whole[:, 1], whole[7, :1], whole.T):
        assert bit_hash(part) == bit_hash(part.clone(memory_format=torch.contiguous_format))


def test_the_hash_is_the_sum_modulo_two_to_the_64_of_words_times_multipliers() -> None:
    """With numbers of Python, which do not wrap, for a tensor below one row."""
    tensor = torch.randint(-(2**63), 2**63 - 1, (5,))
    factors = [(place * PLACE_MULTIPLIER ^ place >> 7) | 1 for place in range(5)]
    total = sum(word * factor for word, factor in zip(tensor.tolist(), factors, strict=True)) * PLACE_MULTIPLIER
    assert int(bit_hash(tensor)) % 2**64 == total % 2**64


def test_groups_of_hashes_are_read_apart() -> None:
    tensors = [torch.full((3,), number) for number in range(3)]
    one, two, three = (int(bit_hash(tensor)) for tensor in tensors)
    assert read_hashes([bit_hash(tensors[0])], [], list(map(bit_hash, tensors[1:]))) == [[one], [], [two, three]]
    assert read_hashes([], []) == [[], []]


def test_the_order_of_hashes_counts() -> None:
    assert combined([1, 2]) != combined([2, 1])
    assert all(0 <= combined([bits]) < 2**32 for bits in (2**63 - 1, -(2**63)))
