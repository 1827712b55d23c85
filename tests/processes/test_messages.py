"""Messages in which an image crosses once."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from fovea.processes.messages import Packing, Share, SharedArguments
from fovea.types import PromptImage


def image(key: str) -> PromptImage:
    pixels = np.full((4, 8), len(key), np.float32)
    return PromptImage(key=key, tensors={"pixel_values": pixels}, num_tokens=1, grid=(1, 2, 2))


def test_an_image_crosses_once_and_arrives_as_one_object() -> None:
    driver, worker, a, b = Packing(), Packing(), image("a"), image("bb")
    first = worker.unpack(driver.pack({"request": [a, a]}))
    second = worker.unpack(driver.pack([a, b]))
    assert first["request"][0] is first["request"][1] is second[0]
    np.testing.assert_array_equal(second[1].tensors["pixel_values"], b.tensors["pixel_values"])
    assert driver.image_bytes == a.num_bytes + b.num_bytes


def test_equal_images_of_different_prompts_cross_once() -> None:
    driver = Packing()
    driver.pack([image("same"), image("same")])
    assert driver.image_bytes == image("same").num_bytes


def test_forgotten_images_are_freed_at_the_receiver_and_sent_again() -> None:
    driver, worker = Packing(), Packing()
    worker.unpack(driver.pack(image("a")))
    driver.forget()
    worker.unpack(driver.pack(image("b")))
    assert list(worker.named) == ["b"]
    assert worker.unpack(driver.pack(image("a"))).key == "a"
    assert driver.image_bytes == 3 * image("a").num_bytes


def test_an_answer_does_not_bring_back_what_the_driver_has_sent() -> None:
    driver, worker, a = Packing(), Packing(), image("a")
    answer = driver.unpack(worker.pack(worker.unpack(driver.pack(a))))
    assert answer is a
    assert worker.image_bytes == 0


class Counted:
    """Counts how often it is encoded."""

    def __init__(self) -> None:
        self.times = 0

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        self.times += 1
        return str, ("counted",)


def test_arguments_for_several_workers_are_encoded_once_and_bring_each_what_it_lacks() -> None:
    a, b, counted = image("a"), image("bb"), Counted()
    arguments, drivers, workers = SharedArguments([counted, [a, b]]), (Packing(), Packing()), (Packing(), Packing())
    workers[0].unpack(drivers[0].pack(a))
    arrived = [
        worker.unpack(driver.pack((number, Share(arguments, {"a", "bb"}))))
        for number, (driver, worker) in enumerate(zip(drivers, workers, strict=True))
    ]
    assert counted.times == 1
    assert [(number, type(each), each[0]) for number, each in arrived] == [(0, tuple, "counted"), (1, tuple, "counted")]
    assert [[each.key for each in images] for _, (_, images) in arrived] == [["a", "bb"], ["a", "bb"]]
    # the first worker had one of the images already, and keeps it
    assert [driver.image_bytes for driver in drivers] == [a.num_bytes + b.num_bytes] * 2
    assert arrived[0][1][1][0] is workers[0].unpack(drivers[0].pack(a))


def test_each_worker_gets_the_pixels_that_it_needs_and_the_sizes_of_the_others() -> None:
    a, b = image("a"), image("bb")
    arguments, driver, worker = SharedArguments([[a, b]]), Packing(), Packing()
    (first,) = worker.unpack(driver.pack(Share(arguments, {"a"})))
    assert [(each.key, len(each.tensors), each.num_tokens, each.grid) for each in first] == [
        ("a", 1, a.num_tokens, a.grid),
        ("bb", 0, b.num_tokens, b.grid),
    ]
    assert driver.image_bytes == a.num_bytes
    # the other one is needed later, and brought then
    (second,) = worker.unpack(driver.pack(Share(arguments, {"bb"})))
    assert second[0] is first[0], "it is still there"
    np.testing.assert_array_equal(second[1].tensors["pixel_values"], b.tensors["pixel_values"])
    assert driver.image_bytes == a.num_bytes + b.num_bytes


def test_an_answer_names_images_whose_pixels_the_worker_was_not_sent() -> None:
    driver, worker, a, b = Packing(), Packing(), image("a"), image("bb")
    arrived = worker.unpack(driver.pack(Share(SharedArguments([a, b]), {"a"})))
    answer = driver.unpack(worker.pack(arrived))
    assert answer[0] is a
    assert answer[1] is b
    assert worker.image_bytes == 0
    # what the worker has only named, it does not hold
    worker.unpack(driver.pack(b))
    assert driver.image_bytes == a.num_bytes + b.num_bytes


def test_packed_bytes_are_those_of_all_messages() -> None:
    driver = Packing()
    messages = [driver.pack(image("a")), driver.pack([image("a"), "text"])]
    assert driver.packed_bytes == sum(map(len, messages))


def test_a_message_without_images_needs_none() -> None:
    assert Packing().unpack(Packing().pack((1, "text", None))) == (1, "text", None)


def test_a_message_that_is_cut_off_is_an_error() -> None:
    with pytest.raises((EOFError, pickle.UnpicklingError)):
        Packing().unpack(Packing().pack(image("a"))[:-10])
