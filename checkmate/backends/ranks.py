"""Ranks that train together: one of them plans a step, and all that train it follow the plan.

The ranks of a job measure their ops each for itself, and come to costs that differ a little; so would their plans. The
rank that asks first plans; what it finds goes to the others through the store of the process group, and with it the
costs that it was found for. A rank looks only for the answer to its own question: the ops, their bytes, the budget and
the method. So the stages of a pipeline, or a rank whose last batch is smaller, get plans of their own, and no rank
waits for one that has nothing to plan. A collective would: that is why none is used.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.fx as fx
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checkmate.backends.error_messages import WRAP_OUTSIDE
from checkmate.backends.step_problem import joint_of
from checkmate.backends.tensor_state import held_modules
from checkmate.capture.around import Around
from checkmate.capture.device import device_of
from checkmate.capture.nodes import is_collective
from checkmate.capture.sharded.collectives import GATHER_AGAIN, as_number, reduce_in_place, same_on_all
from checkmate.core.fingerprint import fingerprints
from checkmate.core.host import Host
from checkmate.core.plan import Run, Start
from checkmate.core.solution import Query, Refusal, Solution, Solver, Status
from checkmate.errors import SolverError, Unsupported
from checkmate.solvers import plan_cache
from checkmate.solvers.plan_cache import Record
from checkmate.torch_internals.capturing import OptimizedModule, dynamo_config, get_optimize_ddp_mode
from checkmate.torch_internals.running import (
    _get_active_ddp_module,
    _get_default_store,
    _resolve_process_group,
    outside_tracing,
)
from checkmate.updates.all_reduce import AsItsModule, Exchange
from checkmate.version import __version__

log = logging.getLogger("checkmate.backends.ranks")

POLL_SECONDS = 0.02  # between two looks for a plan: a look locks the store, so none waits within it
BEAT_SECONDS = 1.0  # between two signs of life of the rank that plans
SILENCE_SECONDS = 15.0  # without one, after which that rank counts as gone


def one_plan(solver: Solver, kind: str = "plan") -> Solver:
    """Make a solver that one of the ranks runs for all that ask the same question; without ranks it runs here.

    A plan of another rank comes with that rank's seconds. Where it does not fit, as more is resident here, this rank
    plans for itself, with a warning. A SolverError says that the rank that plans fails, has ended or does not answer.

    Args:
        kind: of answer: those to the same query may be a plan, and the reason why there is none.

    >>> from checkmate import Problem
    >>> from checkmate.solvers.solve import attempt
    >>> chain = Problem.from_dag([[], [0], [1], [0, 2]], seconds=[1] * 4, sizes=[1] * 4)
    >>> one_plan(attempt)(Query(chain, 4)).cost
    4.0
    """

    def agreed(query: Query) -> Solution:
        store = _store()
        if store is None:
            return solver(query)
        # Agree, among the ranks that ask the same question, on the one that plans: the first to ask.
        rank, host, links = str(dist.get_rank()), query.problem.host, query.problem.graph.links
        prints, room = fingerprints(query.problem), None if host is None else host.budget
        asks = [prints.structure, prints.sizes, query.budget, query.method, kind, room, links, __version__]
        question = f"checkmate/{hashlib.sha256(json.dumps(asks).encode()).hexdigest()}"
        try:
            key = f"{question}/{store.add(f'{question}/asked by {rank}', 1)}"  # whoever asks again, plans again
            planner = store.compare_set(f"{key}/planner", "", rank).decode()
            if planner == rank:
                return _plan_for_all(solver, query, store, key)
            # Wait for its answer, for as long as it gives signs of life.
            log.info("Rank %s plans this step; waiting for its plan.", planner)
            looked = heard = time.monotonic()
            beats = 0
            while not store.check([f"{key}/answer"]):
                now = time.monotonic()
                if now - looked > BEAT_SECONDS:
                    looked, before, beats = now, beats, store.add(f"{key}/beats", 0)
                    heard = heard if beats == before else now
                if now - heard > SILENCE_SECONDS:
                    raise SolverError(
                        f"Rank {planner} was to plan this step for all, and has given no sign of life for "
                        f"{now - heard:.0f} s: its process has ended or stands still. Look at what it said last; out "
                        "of memory is a common reason."
                    )
                time.sleep(POLL_SECONDS)
            document: dict[str, Any] = json.loads(store.get(f"{key}/answer"))
        except dist.DistError as error:
            raise SolverError(
                "Ranks agree on a plan through the store of their process group, which does not answer: the process "
                "that keeps it, rank 0 in most jobs, has ended or cannot be reached. Look at what that one said last. "
                f"({error})"
            ) from error
        # Follow its plan, if that fits here.
        if "failure" in document:
            raise SolverError(f"Rank {planner} was to plan this step for all, and failed. {document['failure']}")
        if (solution := _follow(document, query, planner)) is not None:
            return solution
        log.warning("The plan of rank %s does not fit rank %s, which plans for itself.", planner, rank)
        return solver(query)

    return agreed


class SameExchanges(Around):
    """Check with the other ranks, before a step gathers parameters again, that all will.

    A rank whose plan is another, as its batch is smaller, would wait for the others in vain, or take what was sent for
    something else.
    """

    def __init__(self, plan: Solution) -> None:
        # List the plan's exchanges in order, and the groups that gather parameters again.
        joint = joint_of(plan.problem)
        assert plan.plan is not None
        order = [step.op for step in plan.plan.steps if isinstance(step, (Run, Start))]  # also where it is waited for
        talking = [n for k in order if (n := joint.nodes[k]) is not None and is_collective(n)]
        groups = dict.fromkeys(n.args[-1] for n in talking if n.target is GATHER_AGAIN) if train_together() else {}
        # A group compares its exchanges, as one number.
        self._device = device_of(joint.module.graph)
        exchanges = [(n.args[-1], n.name, tuple(n.meta["val"].shape), n.args[1:]) for n in talking]
        self.numbers = {group: as_number([e for e in exchanges if e[0] == group]) for group in groups}

    def before(self, inputs: list[Any]) -> None:
        """Compare them in each group."""
        for group, number in self.numbers.items():
            if not same_on_all(number, self._device, _resolve_process_group(group)):
                raise Unsupported(
                    f"The ranks follow different plans: rank {dist.get_rank()} gathers parameters in another order, or "
                    "more often, than another rank. Nothing has run. Have all ranks call the step with the same shapes "
                    "and budget; or have each parameter gathered once: "
                    'rules={"_c10d_functional.gather_parameter": 1}.'
                )


def train_together() -> bool:
    """Tell whether other ranks follow the same plans; then no plan is swapped later, as all would have to."""
    return _store() is not None


def sharing_machine() -> int:
    """Count the ranks that share this machine's memory: the local ranks of torchrun, else all."""
    return 1 if _store() is None else int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def least(count: int, graph: fx.Graph, exchange: Exchange | None, device: torch.device) -> int:
    """The least of a count on all ranks that a captured step communicates with, which need the same plan.

    Each of them calls this, as each runs the same exchanges in the same order. Other ranks are not asked: they may plan
    at another time, or never.
    """
    if _store() is None:
        return count
    spoken = dict.fromkeys(node.args[-1] for node in graph.nodes if is_collective(node))
    groups = [_resolve_process_group(name) for name in spoken if isinstance(name, str)]
    groups += [] if exchange is None else [exchange.group]
    with outside_tracing():
        smallest = torch.tensor([count], device=device)
        for group in groups:
            reduce_in_place(smallest, dist.ReduceOp.MIN, group)
        return int(smallest.item())


def _store() -> Any:
    """The store that the ranks share; None for one rank or simulated ranks."""
    is_begun = dist.is_available() and dist.is_initialized()
    if not is_begun or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return None
    return _get_default_store()


def _plan_for_all(solver: Solver, query: Query, store: Any, key: str) -> Solution:
    done = threading.Event()

    # While it plans, a thread counts up in the store, so that who waits can tell that this process lives.
    def beat() -> None:
        with suppress(dist.DistError):  # who plans comes to that by itself, with its answer
            while not done.wait(BEAT_SECONDS):
                store.add(f"{key}/beats", 1)

    thread = threading.Thread(target=beat, name="checkmate planning", daemon=True)
    thread.start()
    try:
        solution = solver(query)
    except BaseException as error:
        store.set(f"{key}/answer", json.dumps({"failure": f"{type(error).__name__}: {error}"}))
        raise
    finally:
        done.set()
        thread.join()
    answer: dict[str, Any]
    if solution.plan is None:
        answer = {"status": solution.status.name, "method": solution.method, "message": solution.message}
        answer["refusal"] = None if solution.refusal is None else asdict(solution.refusal)
    else:
        record = plan_cache.as_document(Record.of(solution, query.method, solution.seconds))
        host = solution.problem.host
        answer = {"record": record, "seconds": solution.problem.seconds.tolist()}
        answer["host"] = None if host is None else asdict(host)
    store.set(f"{key}/answer", json.dumps(answer))
    return solution


def _follow(document: dict[str, Any], query: Query, planner: str) -> Solution | None:
    """Verify and simulate another rank's solution here; None if it does not fit."""
    problem, budget, origin = query.problem, query.budget, f"rank {planner}"
    if "record" not in document:
        status, method, message = Status[document["status"]], document["method"], document["message"]
        refusal = None if document["refusal"] is None else Refusal(**document["refusal"])
        return Solution(status, problem, budget, method, message=message, origin=origin, refusal=refusal)
    costs = replace(problem.profile, seconds=np.array(document["seconds"]))
    record = plan_cache.from_document(document["record"], f"The plan of rank {planner}")
    host = None if document["host"] is None else Host(**document["host"])  # links differ as costs do
    solution = record.certified(replace(problem, profile=costs, host=host), budget)
    return None if solution is None else replace(solution, origin=origin)


def refuse_wrapped(fn: object) -> None:
    """Refuse a module that is wrapped, sharded or compiled already: plans cannot include work before the forward."""
    if isinstance(fn, OptimizedModule):
        raise Unsupported("torch.compile has compiled this module already. Give checkmate.compile the plain one.")
    if isinstance(fn, nn.Module) and (advice := _advice(fn)):
        raise Unsupported(advice)


def refuse_inner(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Refuse a step in which a part of the model communicates with other ranks, naming the part."""
    for module in held_modules(fn, args):
        is_own = args and module is args[0] and inspect.unwrap(type(module).forward, stop=lambda f: f is fn) is fn
        around = module if is_own else None  # hooks run outside
        for name, part in module.named_modules():
            if part is not around and (advice := _advice(part)):
                raise Unsupported(f"{name or type(module).__name__} is a part of the step. {advice}")


def _advice(module: nn.Module) -> str | None:
    """The way out for a module that communicates with other ranks around its forward; None if it does not."""
    if isinstance(module, DistributedDataParallel) and not isinstance(module, AsItsModule):
        return WRAP_OUTSIDE
    sharding: Any = sys.modules.get("torch.distributed.fsdp")  # who has not imported it, shards nothing
    if sharding is not None and isinstance(module, (sharding.FSDPModule, sharding.FullyShardedDataParallel)):
        return (
            "A sharded module gathers its parameters around its forward, outside of any plan. Compile first, and shard "
            "what comes out as one unit: fully_shard(checkmate.compile(model, budget=...)). To have the plan gather "
            'them, shard by the recipe "Sharded parameters in one plan" of docs/ecosystem.md, without fully_shard.'
        )
    return None


def in_one_piece() -> AbstractContextManager[Any]:
    """Keep Dynamo from splitting a graph at the buckets of `DistributedDataParallel`."""
    if _get_active_ddp_module() is None or get_optimize_ddp_mode() != "ddp_optimizer":
        return nullcontext()
    return dynamo_config.patch(optimize_ddp=False)
