"""Stand-in for `torch.cuda` in a process that has one of four GPUs, with the functions that `rollout.checks` calls."""

from __future__ import annotations


class FakeCuda:
    """The current device and those before it, in order."""

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
