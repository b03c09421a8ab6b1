"""Which profiler a user asks for: measured, estimated for a named device, or taken from what was measured elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from checkmate.capture.joint import Joint
from checkmate.core.problem import Profile
from checkmate.errors import Unsupported
from checkmate.profiling.cost_table import OpTable, read
from checkmate.profiling.measure import Measure, fill
from checkmate.profiling.mesh import measured_collectives
from checkmate.profiling.one_op import device_of_op, key_of, runs_alone
from checkmate.profiling.roofline import DEVICES, Device, roofline

Profiler = Callable[[Joint], Profile]
Choice = str | os.PathLike[str] | Profile | OpTable
SHOWN = 5  # of the ops that a table lacks


@dataclass(frozen=True)
class Roofline:
    """Costs estimated for a device."""

    device: Device

    def __call__(self, joint: Joint) -> Profile:
        """The profile of a step."""
        return roofline(joint, self.device)


def listed(joint: Joint, table: OpTable, name: str) -> Profile:
    """The profile of a step by a table of measured ops, of this machine or of another.

    Raises:
        Unsupported: if the table is of another kind of device, or lacks an op that can be measured: an estimate would
            be no promise about memory. Ops that do not run on their own are estimated, as where the table was made.
    """
    nodes = {k: node for k, node in enumerate(joint.nodes) if node is not None}
    kinds = {device_of_op(node).type for node in nodes.values()}
    kind = table.conditions.device.partition(" ")[0]
    if kind not in kinds:
        raise Unsupported(
            f"{name} was measured on {kind}, and this step is traced on {' and '.join(sorted(kinds))}, where "
            "it has other ops. Trace the step on that machine, save it with problem.to_json(...), and plan it here "
            'with Problem.from_json(...); or estimate all ops with profile="roofline:NAME".'
        )
    keys = {k: key_of(node) for k, node in nodes.items()}
    costs = [table.ops.get(keys[k]) if k in keys else None for k in range(len(joint.nodes))]
    lacking = sorted({keys[k] for k, node in nodes.items() if keys[k] not in table.ops and runs_alone(node)})
    if lacking:
        more = f", and {len(lacking) - SHOWN} more" if len(lacking) > SHOWN else ""
        raise Unsupported(
            f"{name}, measured on {table.conditions}, lacks ops of this step: "
            f"{'; '.join(lacking[:SHOWN])}{more}. Trace the step once on that machine, with these shapes and room for "
            "each of these ops by itself, and export again (checkmate.profiling.measure.export); or estimate all ops "
            'with profile="roofline:NAME".'
        )
    collectives = measured_collectives(joint.nodes, lambda node: table.ops)
    return fill(joint, costs, f"{name}: measured on {table.conditions}", collectives)


def given(joint: Joint, profile: Profile) -> Profile:
    """A profile of this very step, with the bytes that are resident in it now.

    Raises:
        Unsupported: if the profile is of another step.
    """
    if len(profile.seconds) != len(joint.nodes):
        raise Unsupported(
            f"The profile has the costs of {len(profile.seconds)} ops, but this step has {len(joint.nodes)}: "
            "it is of another step, or of another version of PyTorch."
        )
    return replace(profile, resident_bytes=joint.resident_bytes)


def profiler(profile: Choice, *, cache: bool = True) -> tuple[Profiler, int]:
    """What finds the costs of ops, and what sizes are rounded up to a multiple of, in bytes.

    Args:
        profile: ``"measure"``, ``"roofline:NAME"``, a file of measured ops whose name ends in ``.json``, such a file as
            `checkmate.profiling.cost_table.read` gives it, or a `Profile` of this very step.
        cache: for ``"measure"``.

    Raises:
        InvalidProblem: if the file is no file of measured ops.
        OSError: if it cannot be read.
        ValueError: if there is no such profile or device.
    """
    if isinstance(profile, Profile):
        return partial(given, profile=profile), 1
    if isinstance(profile, OpTable):
        return partial(listed, table=profile, name="the table"), 1
    if isinstance(profile, os.PathLike) or str(profile).endswith(".json"):
        return partial(listed, table=read(profile), name=Path(profile).name), 1
    if profile == "measure":
        return Measure(cache), 1
    kind, _, name = str(profile).partition(":")
    if kind != "roofline" or name not in DEVICES:
        choices = ", ".join(['"measure"', *(f'"roofline:{name}"' for name in DEVICES), 'a file such as "ops.json"'])
        raise ValueError(f"There is no profile {profile!r}; there are {choices}.")
    return Roofline(DEVICES[name]), DEVICES[name].block_bytes
