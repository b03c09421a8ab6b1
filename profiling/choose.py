"""Which profiler a user asks for: measured, estimated for a named device, or taken from what was measured elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from checkmate.capture import Joint
from checkmate.problem import Profile
from checkmate.profiling.measure import Measure
from checkmate.profiling.roofline import DEVICES, Device, roofline

Profiler = Callable[[Joint], Profile]


@dataclass(frozen=True)
class Roofline:
    """Estimates every op for a device."""

    device: Device

    def __call__(self, joint: Joint) -> Profile:
        """The profile of a step."""
        return roofline(joint, self.device)


def profiler(profile: str, *, cache: bool = True) -> tuple[Profiler, int]:
    """What finds the costs of ops, and what sizes are rounded up to a multiple of, in bytes.

    Raises:
        ValueError: if there is no such profile or device.
    """
    if profile == "measure":
        return Measure(cache), 1
    kind, _, name = profile.partition(":")
    if kind != "roofline" or name not in DEVICES:
        choices = ", ".join(['"measure"', *(f'"roofline:{name}"' for name in DEVICES)])
        raise ValueError(f"There is no profile {profile!r}; there are {choices}.")
    return Roofline(DEVICES[name]), DEVICES[name].block_bytes
