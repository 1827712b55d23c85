"""GPUs of engines: those that an engine gets, and the one that the trainer keeps."""

from __future__ import annotations

import contextlib

import pytest
import torch

from fovea.rollout.checks import check_family, fitting_length, gpus_of_engine, keeping_gpu
from fovea_gym.errors import ConfigError
from tests.tiny_models import tiny


class FakeCuda:
    """`torch.cuda` in a process that has one of four GPUs: its current device and those before it, in order."""

    def __init__(self, own: int) -> None:
        self.devices = [own]

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 4

    def current_device(self) -> int:
        return self.devices[-1]

    def set_device(self, device: int) -> None:
        self.devices.append(device)


def test_an_engine_gets_the_gpus_from_that_of_its_process_on() -> None:
    found = [gpus_of_engine(number, FakeCuda(own)) for own, number in ((0, 1), (3, 1), (2, 1), (2, 2))]
    assert found == [[0], [3], [2], [2, 3]]
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=3, but the process on GPU 2 sees 4 GPUs.*lower it"):
        gpus_of_engine(3, FakeCuda(2))


def test_a_family_that_an_engine_is_not_handed_is_refused() -> None:
    check_family("b", ("a", "b"), model="x", setting="vllm", engine="vLLM")
    with pytest.raises(ConfigError, match=r"vllm, but x is of family idefics3, .* with vLLM \(supported: a, b\); set"):
        check_family("idefics3", ("a", "b"), model="x", setting="vllm", engine="vLLM")


def test_a_default_length_ends_at_the_positions_of_the_model() -> None:
    """A chosen one that is longer is refused."""
    config = tiny("qwen3_vl").network.config
    assert config.text_config.max_position_embeddings == 4096
    assert fitting_length(config, None, 4000, model="x") == 4000
    assert fitting_length(config, None, 5000, model="x") == 4096
    assert fitting_length(config, 4096, 100, model="x") == 4096
    with pytest.raises(ConfigError, match=r"max_model_len=4097, but x has positions for 4096 tokens"):
        fitting_length(config, 4097, 100, model="x")


def test_the_trainer_keeps_its_gpu_when_an_engine_starts_and_when_it_does_not() -> None:
    cuda = FakeCuda(1)
    with keeping_gpu(cuda):
        cuda.set_device(0)
    assert cuda.devices == [1, 0, 1]
    with contextlib.suppress(RuntimeError), keeping_gpu(cuda):
        cuda.set_device(0)
        raise RuntimeError("no memory")
    assert cuda.devices == [1, 0, 1, 0, 1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_without_gpus_none_is_set() -> None:
    with keeping_gpu():
        pass
