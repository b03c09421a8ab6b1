"""Sources of op costs: measured here, a device's data sheet, a table of measured ops, a profile.

Each is a value, or a function of the captured step where its ops are not known before; `profile_of` gives the costs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from checkmate.capture.inplace.aliasing import candidates
from checkmate.capture.joint import Joint
from checkmate.core.problem import Profile
from checkmate.errors import Unsupported
from checkmate.profiling.cost_cache import OpTable, read
from checkmate.profiling.data_sheets import DEVICES, Device, device_named
from checkmate.profiling.measure import Measure, fill, measured
from checkmate.profiling.mesh import measured_collectives
from checkmate.profiling.one_op import device_of_op, key_of, runs_alone
from checkmate.profiling.roofline import roofline

Source = Measure | Device | OpTable | Profile | Callable[[Joint], Profile]
Choice = str | os.PathLike[str] | Profile | OpTable
SHOWN = 5  # of the ops that a table lacks


def source_of(profile: Choice, *, cache: bool = True) -> Source:
    """The source that a user asks for.

    Args:
        profile: ``"measure"``, ``"roofline:NAME"``, a file of measured ops whose name ends in ``.json``, such a file as
            `checkmate.profiling.cost_cache.read` gives it, or a `Profile` of this very step.
        cache: for ``"measure"``.

    Raises:
        InvalidProblem: if the file is no file of measured ops.
        OSError: if it cannot be read.
        ValueError: if there is no such profile or device.
    """
    if isinstance(profile, (Profile, OpTable)):
        return profile
    if isinstance(profile, os.PathLike) or str(profile).endswith(".json"):
        return replace(read(profile), name=Path(profile).name)
    if profile == "measure":
        return Measure(cache)
    kind, _, name = str(profile).partition(":")
    if kind != "roofline":
        raise ValueError(
            f'There is no profile {profile!r}; there are "measure", a file such as "ops.json", and "roofline:NAME" of '
            f"a device: {', '.join(DEVICES)}."
        )
    return device_named(name)


def profile_of(joint: Joint, source: Source) -> Profile:
    """The costs of the ops of a captured step, from a source.

    Raises:
        Unsupported: if the source lacks costs (see `measured`, `roofline`, `listed`), or is a profile of another step.
    """
    if isinstance(source, Measure):
        return measured(joint, cache=source.cache)
    if isinstance(source, Device):
        return roofline(joint, source)
    if isinstance(source, OpTable):
        return listed(joint, source)
    if not isinstance(source, Profile):
        return source(joint)
    if len(source.seconds) != len(joint.nodes):
        raise Unsupported(
            f"The profile has the costs of {len(source.seconds)} ops, but this step has {len(joint.nodes)}: "
            "it is of another step, or of another version of PyTorch."
        )
    over = {(c.op, c.over) for c in candidates(joint)} if source.ways else set()
    ways = tuple(way for way in source.ways if (way.op, way.over) in over)
    return replace(source, resident_bytes=joint.resident_bytes, ways=ways)


def listed(joint: Joint, table: OpTable) -> Profile:
    """The profile of a step from a table of measured ops, of this machine or another.

    Raises:
        Unsupported: if the table is of another kind of device, or lacks an op that can be measured: an estimate would
            be no promise about memory. Ops that do not run on their own are estimated, as where the table was made.
    """
    # The table must be of this kind of device, and have every op.
    nodes = [node for node in joint.nodes if node is not None]
    kinds = {device_of_op(node).type for node in nodes}
    kind = table.conditions.device.partition(" ")[0]
    if kind not in kinds:
        raise Unsupported(
            f"{table.name} was measured on {kind}, and this step is traced on {' and '.join(sorted(kinds))}, where "
            "it has other ops. Trace the step on that machine, save it with problem.to_json(...), and plan it here "
            'with Problem.from_json(...); or estimate all ops with profile="roofline:NAME".'
        )
    keys = [None if node is None else key_of(node) for node in joint.nodes]
    ops = zip(keys, joint.nodes, strict=True)
    lacking = sorted({key for key, node in ops if key and node and key not in table.ops and runs_alone(node)})
    if lacking:
        more = f", and {len(lacking) - SHOWN} more" if len(lacking) > SHOWN else ""
        raise Unsupported(
            f"{table.name}, measured on {table.conditions}, lacks ops of this step: "
            f"{'; '.join(lacking[:SHOWN])}{more}. Trace the step once on that machine, with these shapes and room for "
            "each of these ops by itself, and export again (checkmate.profiling.measure.export); or estimate all ops "
            'with profile="roofline:NAME".'
        )
    costs = [None if key is None else table.ops.get(key) for key in keys]
    collectives = measured_collectives(joint.nodes, lambda node: table.ops)
    return fill(joint, costs, f"{table.name}: measured on {table.conditions}", collectives)
