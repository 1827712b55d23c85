"""Messages in which an image crosses once."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from fovea.processes.messages import Packing, Share, SharedArguments
from fovea.types import PromptImage


def image(key: str) -> PromptImage:
    pixels = np.full((4, 8), len(key), np.float32)
    return PromptImage(key=key, tensors={"pixel_values": pixels}, num_tokens=1, grid=(1, 2, 2))


A, B = image("a"), image("bb")
BOTH_BYTES = A.num_bytes + B.num_bytes


class Ends:
    """A driver and a worker."""

    def __init__(self) -> None:
        self.driver, self.worker = Packing(), Packing()

    def send(self, message: object) -> Any:
        """What arrives at the worker."""
        return self.worker.unpack(self.driver.pack(message))

    def answer(self, message: object) -> Any:
        """What arrives at the driver."""
        return self.driver.unpack(self.worker.pack(message))


def test_an_image_crosses_once_and_arrives_as_one_object_also_in_different_prompts() -> None:
    ends = Ends()
    first, second = ends.send({"request": [A, image("a")]}), ends.send([A, B])
    assert first["request"][0] is first["request"][1] is second[0]
    np.testing.assert_array_equal(second[1].tensors["pixel_values"], B.tensors["pixel_values"])
    assert ends.driver.image_bytes == BOTH_BYTES


def test_forgotten_images_are_freed_at_the_receiver_and_sent_again() -> None:
    ends = Ends()
    ends.send(A)
    ends.driver.forget()
    ends.send(B)
    assert list(ends.worker.named) == ["bb"]
    assert ends.send(A).key == "a"
    assert ends.driver.image_bytes == A.num_bytes + BOTH_BYTES


class Counted:
    """Counts how often it is encoded."""

    times = 0

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        self.times += 1
        return str, ("counted",)


def test_arguments_for_several_workers_are_encoded_once_and_bring_each_what_it_lacks() -> None:
    counted, both = Counted(), (Ends(), Ends())
    arguments = SharedArguments([counted, [A, B]])
    both[0].send(A)
    arrived = [ends.send((number, Share(arguments, {"a", "bb"}))) for number, ends in enumerate(both)]
    assert counted.times == 1
    assert [(number, type(each), each[0]) for number, each in arrived] == [(0, tuple, "counted"), (1, tuple, "counted")]
    assert [[each.key for each in images] for _, (_, images) in arrived] == [["a", "bb"], ["a", "bb"]]
    # the first worker had one of the images already, and keeps it
    assert [ends.driver.image_bytes for ends in both] == [BOTH_BYTES] * 2
    assert arrived[0][1][1][0] is both[0].send(A)


def test_each_worker_gets_the_pixels_that_it_needs_and_the_sizes_of_the_others() -> None:
    ends, arguments = Ends(), SharedArguments([[A, B]])
    (first,) = ends.send(Share(arguments, {"a"}))
    found = [(each.key, len(each.tensors), each.num_tokens, each.grid) for each in first]
    assert found == [("a", 1, A.num_tokens, A.grid), ("bb", 0, B.num_tokens, B.grid)]
    assert ends.driver.image_bytes == A.num_bytes
    # the other one is needed later, and brought then
    (second,) = ends.send(Share(arguments, {"bb"}))
    assert second[0] is first[0], "it is still there"
    np.testing.assert_array_equal(second[1].tensors["pixel_values"], B.tensors["pixel_values"])
    assert ends.driver.image_bytes == BOTH_BYTES


def test_an_answer_names_what_the_driver_has_also_images_whose_pixels_the_worker_was_not_sent() -> None:
    ends = Ends()
    assert ends.answer(ends.send(A)) is A
    a, b = ends.answer(ends.send(Share(SharedArguments([A, B]), {"a"})))
    assert a is A
    assert b is B
    assert ends.worker.image_bytes == 0
    # what the worker has only named, it does not hold
    ends.send(B)
    assert ends.driver.image_bytes == BOTH_BYTES


def test_packed_bytes_are_those_of_all_messages_and_one_without_images_needs_none() -> None:
    driver = Packing()
    messages = [driver.pack(A), driver.pack([A, "text"])]
    assert driver.packed_bytes == sum(map(len, messages))
    assert Packing().unpack(Packing().pack((1, "text", None))) == (1, "text", None)


def test_a_message_that_is_cut_off_is_an_error() -> None:
    with pytest.raises((EOFError, pickle.UnpicklingError)):
        Packing().unpack(Packing().pack(A)[:-10])
