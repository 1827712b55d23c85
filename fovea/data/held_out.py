"""The choice of rows to hold out of a training set, by image: rows that share an image are on the same side.

An image is known by a hash of what the row holds, which opens nothing: of the encoded bytes, of the pixels of an
array or a Pillow image, else of the path or URL. One picture under two paths, or encoded twice, counts as two.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from fovea.data.cells import image_refs
from fovea.data.rows import Rows
from fovea.errors import BadRowError
from fovea.types import ImageRef

_HASH_BYTES = 12


class Sides(NamedTuple):
    """Row numbers of a data set in two parts that share no image."""

    kept: list[int]
    """In the order of the data set."""
    held_out: list[int]
    """In the order of their hashes, so that the first few are a sample of all."""


def split_by_image(images: Iterable[Sequence[bytes]], *, share: float, seed: int) -> Sides:
    """Hold out about `share` of the rows, given the hashes of each row's images.

    Rows that share an image, directly or through other rows, form a group; a row without images is one of its own.
    Whole groups are taken in the order of their seeded hashes, those that still fit into the share; if none fits, the
    smallest one. Nothing is held out of a single group. Rows that are added later do not change the order of the
    groups that were there.
    """
    hashes_of_rows = list(images)
    groups = _groups(hashes_of_rows)
    if share == 0 or len(groups) < 2:
        return Sides(list(range(len(hashes_of_rows))), [])
    ranked = sorted(groups, key=lambda group: _rank(group, hashes_of_rows, seed))
    wanted, taken = share * len(hashes_of_rows), list[int]()
    for group in ranked:
        if len(taken) + len(group) <= wanted:
            taken += group
    taken = taken or min(ranked, key=len)
    held_out = set(taken)
    return Sides([row for row in range(len(hashes_of_rows)) if row not in held_out], taken)


def image_hashes(rows: Rows, columns: Sequence[str]) -> Iterable[tuple[bytes, ...]]:
    """Hashes of the images in these columns, row by row; none for cells that hold no image."""
    for index, cells in enumerate(zip(*(rows.column(name) for name in columns), strict=True)):
        try:
            refs = image_refs(*cells, where=rows.where(index), folder=rows.folder(index))
        except BadRowError:  # it is counted when a split comes to it
            refs = ()
        yield tuple(map(_image_hash, refs))


def _image_hash(ref: ImageRef) -> bytes:
    source = ref.source
    if isinstance(source, str):
        content = source.encode("utf-8", "surrogatepass")
    elif isinstance(source, bytes):
        content = source
    else:
        pixels = np.asarray(source)
        content = repr(pixels.shape).encode() + pixels.tobytes()
    return hashlib.blake2b(content, digest_size=_HASH_BYTES).digest()


def _groups(hashes_of_rows: Sequence[Sequence[bytes]]) -> list[list[int]]:
    """Rows by group, connected through shared images (union-find over row numbers)."""
    parent = list(range(len(hashes_of_rows)))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = row = parent[parent[row]]
        return row

    first_row: dict[bytes, int] = {}
    for row, hashes in enumerate(hashes_of_rows):
        for each in hashes:
            parent[root(row)] = root(first_row.setdefault(each, row))
    groups = defaultdict[int, list[int]](list)
    for row in range(len(parent)):
        groups[root(row)].append(row)
    return list(groups.values())


def _rank(group: Sequence[int], hashes_of_rows: Sequence[Sequence[bytes]], seed: int) -> bytes:
    """A hash of the group's images; of its row number for a row without images."""
    own = min((each for row in group for each in hashes_of_rows[row]), default=b"row %d" % group[0])
    return hashlib.blake2b(own, digest_size=_HASH_BYTES, key=b"%d" % seed).digest()
