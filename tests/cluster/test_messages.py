"""Messages in which an image crosses once."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from fovea.cluster.messages import Inbox, Outbox
from fovea.types import PromptImage


def image(key: str) -> PromptImage:
    return PromptImage(key=key, tensors={"pixel_values": np.full((4, 8), len(key), np.float32)}, num_tokens=1)


def test_an_image_crosses_once_and_arrives_as_one_object() -> None:
    outbox, inbox, a, b = Outbox(), Inbox(), image("a"), image("bb")
    first = inbox.unpack(outbox.pack({"request": [a, a]}))
    second = inbox.unpack(outbox.pack([a, b]))
    assert first["request"][0] is first["request"][1] is second[0]
    np.testing.assert_array_equal(second[1].tensors["pixel_values"], b.tensors["pixel_values"])
    assert outbox.image_bytes == a.num_bytes + b.num_bytes


def test_equal_images_of_different_prompts_cross_once() -> None:
    outbox = Outbox()
    outbox.pack([image("same"), image("same")])
    assert outbox.image_bytes == image("same").num_bytes


def test_forgotten_images_are_freed_at_the_receiver_and_sent_again() -> None:
    outbox, inbox = Outbox(), Inbox()
    inbox.unpack(outbox.pack(image("a")))
    outbox.forget()
    inbox.unpack(outbox.pack(image("b")))
    assert list(inbox._images) == ["b"]
    assert inbox.unpack(outbox.pack(image("a"))).key == "a"
    assert outbox.image_bytes == 3 * image("a").num_bytes


def test_a_message_without_images_needs_none() -> None:
    assert Inbox().unpack(Outbox().pack((1, "text", None))) == (1, "text", None)


def test_a_message_that_is_cut_off_is_an_error() -> None:
    with pytest.raises((EOFError, pickle.UnpicklingError)):
        Inbox().unpack(Outbox().pack(image("a"))[:-10])
