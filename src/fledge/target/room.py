"""How much memory a target's states may take for reuse in later epochs. Imports neither torch nor
pydantic."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KeptStates:
    """Memory for states: on the target's device first, then in host memory."""

    device_bytes: int = 0
    host_bytes: int = 0
    eight_bits: bool = False

    def __bool__(self) -> bool:
        return self.device_bytes + self.host_bytes > 0
