"""The device's memory as a budget in bytes, kept on a CPU too, so that what fits a GPU can be told without one."""

import torch

from hpcgen.errors import HpcgenError


class OutOfDeviceMemory(HpcgenError):
    """A reservation does not fit the budget."""


class DeviceBudget:
    """Hands out device buffers and counts them by purpose. `limit` in bytes; None counts without a limit."""

    def __init__(self, limit: int | None, device: torch.device):
        self.limit = limit
        self.device = device
        self.peak = 0
        self._used: dict[str, int] = {}

    @property
    def used(self) -> int:
        return sum(self._used.values())

    @property
    def free(self) -> int | None:
        return None if self.limit is None else self.limit - self.used

    def by_purpose(self) -> dict[str, int]:
        """Bytes now reserved, by purpose."""
        return dict(self._used)

    def reserve(self, purpose: str, nbytes: int) -> None:
        """Counts `nbytes` under `purpose`. Raises OutOfDeviceMemory where they are more than what is left."""
        if self.limit is not None and self.used + nbytes > self.limit:
            table = ", ".join(f"{name} {_mib(size)}" for name, size in self._used.items()) or "nothing"
            raise OutOfDeviceMemory(
                f"{purpose} needs {_mib(nbytes)}, but of the device budget of {_mib(self.limit)} these are in use: "
                f"{table}. Raise --device-memory, or lower --attention-microbatch, --expert-batch or --max-model-len."
            )
        self._used[purpose] = self._used.get(purpose, 0) + nbytes
        self.peak = max(self.peak, self.used)

    def release(self, purpose: str) -> None:
        """Gives back all that is reserved under `purpose`."""
        self._used.pop(purpose, None)

    def buffer(self, purpose: str, nbytes: int) -> torch.Tensor:
        """A new uint8 buffer of `nbytes` on the device, counted under `purpose`."""
        self.reserve(purpose, nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
