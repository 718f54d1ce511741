"""How much of a target's states later epochs may find in memory. Imports no torch, no pydantic."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KeptStates:
    """Room for states: on the target's device, and in the host's memory when that is full."""

    device_bytes: int = 0
    host_bytes: int = 0
    eight_bits: bool = False

    def __bool__(self) -> bool:
        return self.device_bytes + self.host_bytes > 0
