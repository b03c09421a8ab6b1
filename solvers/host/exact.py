"""Integer programs with a second memory: the exact one, whose rows every plan obeys, and that of POET (`poet`).

A plan is looked at in the moments in which ops run for the first time. Stage t is what happens after the first
execution of op t - 1 up to the end of that of op t, whatever it is and in whatever order. Of a plan,

    R[t, k]    op k runs in stage t, once or more often
    S[t, v]    v is at hand when op t runs for the first time, and was before
    H[t, v]    a copy is in the second memory then, complete and waited for
    Out[t, v]  v is on its way there then: asked for before, waited for later
    In[t, v]   it is on its way back then
    E[t, v]    a transfer there was waited for in stage t, before op t runs
    F[t, v]    a transfer back was
    q, p       the shares that are carried, of what is under way, when op t has run
    o, f       the shares carried in stage t; e, c those of transfers that were waited for in it

Then these hold, of every plan, and so the optimum of the program bounds it (each family of rows says why). The bytes
are asked for in these moments only, and the links' seconds stage by stage: that ops which run again fit beside what
stays, in which order transfers are carried, is left out. No row was added because good plans obey it: the two that
leave plans out, that a value is not kept, sent or made when nothing can read it any more, leave out useless steps only.

A value at home there has H = 1 without a transfer until op u overwrites it, where one does. Then, in every plan,

    S[t, v] + H[t, v] >= 1                        every stage t > u: the new bytes are somewhere
    Σ_t E[t, v] + home[v] >= 1,  home[v] <= S[T-1, v]       sent before the last op runs, or it ends behind that
    S[T-1, v] + back[v] >= 1                      v kept here from call to call, S[0, v] from the start

and the step lasts as much longer as a link carries what is left of home and back after the last op.

What an answer runs and fetches in each stage becomes a plan, whose seconds the simulator tells; so do the best ways to
run beside what it sends, or parts of that. Where the seconds are those of the bound, the plan is the best there is.

POET plans recomputation and paging together, and the device pays for each page as for an op. Patil et al., "POET:
Training Neural Networks on Tiny Devices with Integrated Rematerialization and Paging", ICML 2022:

    SRam[t+1] <= SRam[t] + R[t] + MIn[t],  SSd[t+1] <= SSd[t] + MOut[t],  MIn[t] <= SSd[t],  MOut[t] <= SRam[t]
    min Σ_t Σ_k (energy of op k) R[t, k] + (of paging) (MIn[t, k] + MOut[t, k])      within the RAM of the device

Here with seconds for energy, and with values in place of ops: SRam is S of `checkmate.solvers.linear.equations`,
where bytes are counted, too. Pages move between two stages; of what stage t keeps, K[t, v] was there before they do:

    S[t, v] <= K[t-1, v] + MIn[t, v],  K[t, v] + Σ_k FREE[t, v, k] <= R[t, prod(v)] + S[t, v],  MOut[t, v] <= K[t-1, v]
    SSd[t, v] <= SSd[t-1, v] + MOut[t, v],  MIn[t, v] <= SSd[t-1, v],  Σ_v M_v SSd[t, v] <= bytes there

The program pays for a page by itself; in the plan, as on a device with direct memory access, pages move to where ops
run beside them.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np

from checkmate.core import simulator
from checkmate.core.limits import lives
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.schedule import Schedule
from checkmate.errors import SolverError
from checkmate.solvers.common.fetches import place_transfers, plain_events, sendable, with_fetches
from checkmate.solvers.common.flat_problem import Touches
from checkmate.solvers.common.incumbent import Incumbent, Remarks, Task
from checkmate.solvers.common.schedules import lowered, obeys_limits, without_useless
from checkmate.solvers.host.offload import SentSets
from checkmate.solvers.linear import equations, highs
from checkmate.solvers.linear import milp as linear
from checkmate.solvers.linear.equations import makers, most_saved_bytes, own_bytes, results_bytes
from checkmate.solvers.linear.links import link_seconds
from checkmate.solvers.linear.model import INF, NONE, Model, Term, after, before, pairs

SHARE_OF_RECOMPUTATION, SHARE_OF_SETS = 0.3, 0.1  # of the time; of what is left, for what else could be sent
MOST_OPS = 200  # beyond this the program takes gigabytes, and finds nothing in minutes


def exact(
    task: Task,
    incumbent: Incumbent,
    *,
    formulation: str = "strengthened",
    start: Schedule | None = None,
    target: float | None = None,
) -> Remarks:
    """The cheapest plan within a budget, proven or with a bound; with a second memory if the problem has one.

    Args:
        formulation: "strengthened", or "paper" for comparison, without a second memory.
        start: a known schedule to start from; the answer is never worse. Ignored where it does not fit the budget.
        target: stop at a plan that takes at most this many seconds.

    Raises:
        ValueError: if the formulation is unknown, or is none for a second memory.
        SolverError: if the solver fails, or its answer does not pass the verifier.

    >>> from checkmate import Problem, solve
    >>> from checkmate.core.host import Host
    >>> chain = Problem.from_dag([[], [0], [1], [1, 2], [0, 3]], seconds=[4, 1, 1, 1, 1], sizes=[2] * 5, forward=3)
    >>> [solve(one, 7, method="milp").cost for one in (chain, chain.with_host(Host(8, 4.0, 4.0)))]
    [12.0, 8.5]
    """
    if task.problem.host is None:
        return linear.milp(task, incumbent, formulation=formulation, start=start, target=target)
    if formulation != "strengthened":
        raise ValueError(f"With a second memory there is formulation='strengthened', not {formulation!r}.")
    # The cheapest plan that sends nothing, where nothing is at home there.
    sets = SentSets(task.within(SHARE_OF_RECOMPUTATION * task.clock.left), incumbent, linear.milp)
    if task.problem.homes:
        sets.attempt(())
    else:
        alone = Incumbent(replace(sets.task, problem=task.problem.with_host(None)))
        linear.milp(alone.task, alone, start=start, target=target)
        if alone.R is not None:
            incumbent.offer(alone.R, "recomputation")
    if incumbent.R is not None and (incumbent.gap <= task.gap or incumbent.cost <= (target or 0.0)):
        return Remarks()
    program, unit = Program(task.problem, task.budget), equations.cost_unit(task.problem)

    def offer(values: np.ndarray) -> None:
        R, F = (program.model.value(values, family).round().astype(bool) for family in (program.R, program.F))
        plan = plan_of(task.problem, task.budget, R, F)
        if plan is not None:
            incumbent.offer(plan, "milp")

    def on_incumbent(values: np.ndarray) -> None:
        with contextlib.suppress(SolverError):  # the answer at the end decides whether the solver is right
            offer(values)

    # The program with transfers, and each of its answers as a plan.
    result = highs.run(
        program.model, on_incumbent=on_incumbent, time_limit=task.clock.left, gap=task.gap, threads=task.threads
    )
    incumbent.prove(result.bound * unit)
    if incumbent.is_infeasible:
        return Remarks("no plan has all that ops need at hand within the budget")
    # The sets of values around the ones that the best answer sends.
    sent = sendable(task.problem)
    if result.x is not None:
        offer(result.x)
        sent = np.flatnonzero(program.model.value(result.x, program.F).any(axis=0)).tolist()
    sets = SentSets(task.within(SHARE_OF_SETS * task.clock.left), incumbent, linear.milp)
    sets.attempt_parts([v for v in sent if v not in task.problem.homes])
    return Remarks(details={"columns": program.model.columns, "rows": program.model.rows, "bound": result.bound * unit})


def plan_of(problem: Problem, budget: int, R: np.ndarray, F: np.ndarray) -> Plan | None:
    """The plan that runs R (T, T) and fetches F (T, V) in each stage, both bool; None if it breaks a budget or a rule.

    Values that are fetched anywhere are sent when they are made. Transfers begin and end where they are waited for
    least.
    """
    # The runs of the problem with fetch ops: a value is fetched where F says so, or where its op reruns.
    sent = [v for v in np.flatnonzero(F.any(axis=0)).tolist() if v not in problem.homes]
    fetching, over = with_fetches(problem, sent), problem.graph.overwritten_by
    runs = np.eye(len(fetching.op), dtype=bool)
    stages = [at for at, k in enumerate(fetching.op) if k is not None]
    runs[np.ix_(stages, stages)] |= R
    for at, v in enumerate(fetching.value):
        if v is not None:
            producer, again = problem.graph.values[v].producer, F[:, v].copy()
            if producer is not None:
                again |= R[:, producer]
            if v in over:  # the one before it is overwritten, or the one after that
                is_new = fetching.problem.graph.ops[at].outputs[0] in fetching.renewed
                again &= (np.arange(len(again)) > over[v]) == is_new
            runs[[stage for stage, wanted in zip(stages, again, strict=True) if wanted and stage > at], at] = True
    runs = without_useless(fetching.problem.graph, runs)
    if not obeys_limits(fetching.problem, runs):
        return None
    return place_transfers(problem, budget, *plain_events(fetching, lowered(fetching.problem, runs)))


class Program:
    """The model of a problem with a second memory under a budget in bytes, its seconds in units of the mean op's.

    Families of columns are (T, V), `NONE` where the variable is known to be zero; R is (T, T), and D (T,): seconds.
    """

    def __init__(self, problem: Problem, budget: int) -> None:
        assert problem.host is not None
        self.problem, self.budget, self.host = problem, budget, problem.host
        self.touch, self.model = Touches.of(problem), Model()
        graph, T = problem.graph, len(problem.graph.ops)
        _, plain = equations.build(problem, budget)  # which runs can be of use, and fit
        # Which values are at hand when a stage begins, which it needs, and over which its op may write.
        v, made_by = self.touch.values()
        read = np.array(lives(graph, problem.limits.last_stage)[1])
        stage = np.arange(T)[:, None]
        S = np.zeros((T, len(graph.values)), dtype=bool)
        S[:, v] = (stage > made_by) & (stage <= read[v])
        # Homes: from the begin on, those that are overwritten or kept until the end.
        homes, kept = (np.isin(np.arange(S.shape[1]), [*values]) for values in (problem.homes, problem.kept))
        first = np.array([graph.overwritten_by.get(w, T) for w in range(S.shape[1])])
        clean, dirty = homes & (stage < first), homes & (stage > first)
        S |= homes & ((stage <= read) | kept | (stage >= first))
        needed, over, own = np.zeros_like(S), np.zeros_like(S), np.zeros_like(S)
        for k, op in enumerate(graph.ops):
            needed[k, [*op.inputs]] = True
            over[k, [w for w, _ in problem.savings[k]]] = True
        own[made_by, v] = True
        # The columns: R, S, what is written over; H, Out and In at the end of a stage, E and F before its op.
        soon, T_1 = may_go(problem, S), stage == T - 1
        going = soon & after(S, False)
        fetched, sent = soon | (S & homes), soon | (S & dirty)
        coming, leaving = (fetched & after(S, False)) | (S & kept & T_1), going | (S & dirty)
        columns = self.model.variables
        self.R = columns(plain.R != NONE, name="R", lower=np.eye(T), integer=True)
        self.S = columns(S, name="S", lower=needed.astype(float), integer=True)
        runs = makers(self.R, self.touch, S.shape)
        # at hand when stage t begins: S of the stage before, or made by its op
        self.here = np.where(before(own, False), before(np.where(own, runs, NONE)), before(self.S))
        self.made = np.where(own, NONE, runs)  # R[t, prod(v)] of what runs again
        self.over = columns(over, name="OVER", integer=True)  # op t writes over v when it runs for the first time
        self.H = columns(going | clean | dirty, name="H", lower=clean, integer=True)
        self.Out, self.In = columns(leaving, name="Out", integer=True), columns(coming, name="In", integer=True)
        self.E, self.F = columns(sent, name="E", integer=True), columns(fetched, name="F", integer=True)
        # H of the stage before; at the begin all homes are there, and those that are kept are here.
        self.copied, at_begin = before(self.H), columns(homes[None], name="begin", lower=1.0)[0]
        self.copied[0], self.here[0, kept] = at_begin, at_begin[kept]
        # The parts of transfers that a stage takes, and its seconds D.
        q, p = columns(leaving, name="q"), columns(coming, name="p")
        self.o, self.f, self.e, self.c = (
            columns(mask, name=name) for name, mask in zip("ofec", (sent, fetched) * 2, strict=True)
        )
        self.D = columns((T,), name="D", upper=INF, cost=1.0)
        # (T, V) each: where a value that is at hand in stage t is from, in a row that is at most 0
        self.sources = [(self.here, -1.0), (before(self.over), 1.0), (self.made, -1.0), (self.F, -1.0)]
        self.carry("send", (q, self.e, self.E, self.o), self.Out)
        self.carry("fetch", (p, self.c, self.F, self.f), self.In)
        self.have_inputs()
        self.stay()
        self.go_and_come()
        self.fit()
        self.fit_again()
        self.take_time()
        if problem.homes:
            self.come_home(dirty, np.flatnonzero(homes & (first < T)), np.flatnonzero(kept), q, p)
        equations.run_at_most(self.model, self.R, problem)

    def carry(self, name: str, shares: tuple[np.ndarray, ...], under_way: np.ndarray) -> None:
        """Carry in stage t the rest of transfers that end in it, and a share of those still under way.

        q[t] <= Out[t],  o[t] >= E[t] + q[t] - q[t-1],  e[t] >= E[t] - q[t-1]      of v, every stage t

        Of v that was sent more often than once in a stage more was carried.
        """
        done, ended, ends, carried = shares
        model, earlier = self.model, (before(done), 1.0)
        pairs(model, f"{name}: under way", done, [(under_way, -1.0)])
        pairs(model, f"{name}: carried", carried, [(ends, -1.0), (done, -1.0), earlier], upper=INF, lower=0.0)
        pairs(model, f"{name}: ended", ended, [(ends, -1.0), earlier], upper=INF, lower=0.0)

    def have_inputs(self) -> None:
        """An op that runs again finds its inputs: here when the stage began, made or fetched in it.

        R[t, j] + over[t-1, v] <= here[t, v] + R[t, prod(v)] + F[t, v]      every stage t, op j < t, input v of j

        What op t - 1 has written over is not here. Inputs of op t itself have S[t, v] = 1.
        """
        touch, homes = self.touch, self.problem.homes
        at_home = [(k, v) for k, op in enumerate(self.problem.graph.ops) for v in op.inputs if v in homes]
        reads = np.array([touch.op, touch.value])[:, touch.reads]
        readers, read = np.hstack([reads, np.array(at_home, dtype=np.int64).reshape(-1, 2).T])
        mask = self.R[:, readers] != NONE
        mask[readers, np.arange(len(readers))] = False
        t, e = np.nonzero(mask)
        v = read[e]
        terms = [(self.R[t, readers[e]], 1.0), *((family[t, v], sign) for family, sign in self.sources)]
        self.model.constrain("have inputs", terms, upper=0.0)

    def stay(self) -> None:
        """Hold values: each was held in the moment before, or was made or fetched between; copies likewise.

        S[t, v], E[t, v] <= here[t, v] - over[t-1, v] + R[t, prod(v)] + F[t, v]      every stage t, value v
        S[t, v] <= R[t, prod(v)]      the first stage t of the backward, v that a rule has made again there
        """
        pairs(self.model, "stay", self.S, self.sources)
        pairs(self.model, "send what is here", self.E, self.sources)
        gone = np.full(self.S.shape, NONE)
        if values := [*self.problem.limits.recomputed]:
            t = self.problem.graph.forward_length
            gone[t, values] = self.S[t, values]
        pairs(self.model, "made again", gone, [(self.made, -1.0)])

    def go_and_come(self) -> None:
        """Order transfers: only sent values have copies, only absent ones with copies are fetched; each is waited for.

        Out[t] <= S[t],  Out[t] + over[t] <= 1,  H[t] + Out[t] <= 1,  H[t] <= H[t-1] + E[t],  Out[t-1] <= Out[t] + E[t]
        In[t] + S[t] <= 1,  In[t] <= H[t],  F[t] <= H[t-1] + E[t],  In[t-1] <= In[t] + F[t]      of v, every stage t
        """
        copied = [(self.copied, -1.0), (self.E, -1.0)]
        copies = np.where(self.model.lower[self.H] > 0, NONE, self.H)  # those at home need no transfer
        for name, first, terms, upper in (
            ("send what is at hand", self.Out, [(self.S, -1.0)], 0.0),
            ("write over nothing sent", self.Out, [(self.over, 1.0)], 1.0),
            ("send no copy", self.H, [(self.Out, 1.0)], 1.0),
            ("copy", copies, copied, 0.0),
            ("wait for what is sent", before(self.Out), [(self.Out, -1.0), (self.E, -1.0)], 0.0),
            ("fetch what is away", self.In, [(self.S, 1.0)], 1.0),
            ("fetch a copy", self.In, [(self.H, -1.0)], 0.0),
            ("back from a copy", self.F, copied, 0.0),
            ("wait for what is fetched", before(self.In), [(self.In, -1.0), (self.F, -1.0)], 0.0),
        ):
            pairs(self.model, name, first, terms, upper=upper)

    def fit(self) -> None:
        """Both budgets hold in each moment.

        Σ_{v not in in(t)} M_v S[t, v] + Σ_v M_v In[t, v] - Σ_v saved_v over[t, v] <= budget - what op t has at hand
        Σ_v M_v (H[t, v] + Out[t, v]) <= host budget,  Σ_v over[t, v] <= 1
        """
        unit, kept, problem = equations.size_unit(self.problem), self.S.copy(), self.problem
        homes = [*problem.homes]
        M, saved = problem.sizes / unit, np.zeros(self.S.shape)
        for k, op in enumerate(problem.graph.ops):
            kept[k, [*op.inputs]] = NONE
            for v, less in problem.savings[k]:
                saved[k, v] = less / unit
        copies = np.array([self.H, self.Out])
        copies[:, :, homes] = NONE
        own = problem.with_homes(problem.homes).unavoidable_bytes  # without what is kept before and after the step
        room = (self.budget - own) / unit - saved.max(axis=1)
        self.model.constrain("fit", [(kept, M), (self.In, M), (self.over, -saved)], upper=room)
        room_there = (self.host.budget - problem.homes_bytes) / unit
        self.model.constrain("fit there", [(family, M) for family in copies], upper=room_there)
        self.model.constrain("write over one", [(self.over, 1.0)], upper=1.0)

    def fit_again(self) -> None:
        """Fit an op that runs again beside the values that stay through the stage, those made in it aside.

        Σ_{v not in in(k), out(k)} M_v stays[t, v] + own_k R[t, k] <= budget - resident - results before stage t
        stays[t, v] >= S[t, v] - R[t, prod(v)] - F[t, v]      every stage t, op k < t

        own_k: inputs, outputs and workspace of op k, less what its best way saves.
        """
        problem, unit = self.problem, equations.size_unit(self.problem)
        stays = self.model.variables(self.S != NONE, name="stays")
        pairs(self.model, "new or there before", self.S, [(self.made, -1.0), (self.F, -1.0), (stays, -1.0)])
        own = (own_bytes(problem) - most_saved_bytes(problem)) / unit
        t, again = np.nonzero(np.tril(self.R != NONE, -1))
        beside = stays[t]
        for row, k in enumerate(again.tolist()):
            beside[row, [*problem.graph.ops[k].inputs, *problem.graph.ops[k].outputs]] = NONE
        room = (self.budget - problem.resident - results_bytes(problem))[t] / unit
        terms: list[Term] = [(beside, problem.sizes / unit), (self.R[t, again], own[again])]
        self.model.constrain("fit again", terms, upper=room)

    def take_time(self) -> None:
        """A stage lasts at least as long as its ops, each link's share, and transfers that end before its last op.

        D[t] >= Σ_k C_k R[t, k],  Σ_v out_v o[t, v],  Σ_v back_v f[t, v]
        D[t] >= C_t + Σ_v out_v e[t, v],  C_t + Σ_v back_v c[t, v]

        One link: the sums over both directions.
        """
        out, back = link_seconds(self.problem, self.host)
        seconds, D = self.problem.seconds / equations.cost_unit(self.problem), self.D[:, None]
        self.model.constrain("ops", [(D, 1.0), (self.R, -seconds)], lower=0.0)
        sends, fetches = [(self.o, -out)], [(self.f, -back)]
        ended_sends, ended_fetches = [(self.e, -out)], [(self.c, -back)]
        ways = [("link there", sends, ended_sends), ("link back", fetches, ended_fetches)]
        if self.host.one_link:
            ways = [("link", sends + fetches, ended_sends + ended_fetches)]
        for name, carried, ended in ways:
            self.model.constrain(name, [(D, 1.0), *carried], lower=0.0)
            self.model.constrain(f"{name}, then the op", [(D, 1.0), *ended], lower=seconds)

    def come_home(self, dirty: np.ndarray, written: np.ndarray, kept: np.ndarray, q: np.ndarray, p: np.ndarray) -> None:
        """Add the rows of the end of a step: homes are there, and kept copies here; see the module.

        Args:
            dirty: (T, V) bool, stages after a home's bytes have changed.
            written, kept: homes that are overwritten, and those that are kept.
            q, p: columns (T, V), the shares of transfers under way that are carried when op t has run.
        """
        model, S = self.model, self.S[-1]
        pairs(model, "somewhere", np.where(dirty, self.S, NONE), [(self.H, 1.0)], upper=INF, lower=1.0)
        sizes = [(len(written),), (len(written),), (len(kept),), (len(kept),)]
        home, sends, back, fetches = (model.variables(size, name=f"end {i}") for i, size in enumerate(sizes))
        model.constrain("sent in the end", [(self.E[:, written].T, 1.0), (home, 1.0)], lower=1.0)
        model.constrain("send what is here in the end", [(home, 1.0), (S[written], -1.0)], upper=0.0)
        model.constrain("rest of sends", [(sends, 1.0), (home, -1.0), (q[-1, written], 1.0)], lower=0.0)
        model.constrain("here in the end", [(S[kept], 1.0), (back, 1.0)], lower=1.0)
        model.constrain("rest of fetches", [(fetches, 1.0), (back, -1.0), (p[-1, kept], 1.0)], lower=0.0)
        D = model.variables((1,), name="D end", upper=INF, cost=1.0)
        out, fetch = link_seconds(self.problem, self.host)
        carried = [(sends[None], -out[written]), (fetches[None], -fetch[kept])]
        for i, terms in enumerate([carried] if self.host.one_link else [[term] for term in carried]):
            model.constrain(f"end of link {i}", [(D, 1.0), *terms], lower=0.0)


def may_go(problem: Problem, S: np.ndarray) -> np.ndarray:
    """(T, V) bool: the stages in which a sendable value may be away; S (T, V) bool: those in which it may be kept."""
    goes = np.zeros(len(problem.sizes), dtype=bool)
    assert problem.host is not None
    goes[[v for v in sendable(problem) if problem.sizes[v] <= problem.host.budget]] = True
    return S & goes


def poet(task: Task, incumbent: Incumbent) -> Remarks:
    """The plan of POET's integer program, by HiGHS; no plan if HiGHS finds none in time.

    >>> from checkmate import Problem, solve
    >>> from checkmate.core.host import Host
    >>> chain = Problem.from_dag([[], [0], [1], [1, 2], [0, 3]], seconds=[4, 1, 1, 1, 1], sizes=[2] * 5, forward=3)
    >>> solve(chain.with_host(Host(8, 4.0, 4.0)), 6, method="poet").cost
    8.5
    """
    problem = task.problem
    if (count := len(problem.graph.ops)) > MOST_OPS:
        return Remarks(f"its integer program is of use up to {MOST_OPS} ops, and there are {count}")
    model, R, page_in = build(problem, task.budget)
    result = highs.run(model, time_limit=task.clock.left, gap=task.gap, threads=task.threads)
    figures: dict[str, float] = {"columns": model.columns, "rows": model.rows}
    if result.x is None:
        return Remarks(f"HiGHS ends without a plan: {result.outcome.value}", figures)
    figures["one device"] = result.objective * equations.cost_unit(problem)
    runs, pages = (model.value(result.x, family).round().astype(bool) for family in (R, page_in))
    plan = plan_of(problem, task.budget, runs, pages)
    if plan is None:
        return Remarks("there is no room for its pages beside what ops need while they move", figures)
    incumbent.offer(plan, "poet")
    return Remarks(details=figures | {"overlapped": simulator.cost(plan, problem)})


def build(problem: Problem, budget: int) -> tuple[Model, np.ndarray, np.ndarray]:
    """The program under a budget in bytes, in units of the mean op's seconds, with the columns of R and MIn."""
    assert problem.host is not None
    base, plain = equations.build(problem, budget)  # where R, S, FREE and OVER can be one, and how large U
    model, seconds = Model(), problem.seconds / equations.cost_unit(problem)
    R, S, FREE, OVER, U = (family != NONE for family in (plain.R, plain.S, plain.FREE, plain.OVER, plain.U))
    # R, S, FREE, OVER, U of recomputation alone: SRam is S.
    x = equations.Variables(
        R=model.variables(R, name="R", lower=np.eye(len(R)), cost=seconds, integer=True),
        S=model.variables(S, name="SRam", integer=True),
        FREE=model.variables(FREE, name="FREE"),
        OVER=model.variables(OVER, name="OVER"),
        U=model.variables(U, name="U", upper=np.where(U, base.upper[plain.U], 0.0)),
        touches=plain.touches,
    )
    # Pages: at hand after the ops of a stage (K), in the second memory (SSd), sent and fetched there.
    away = may_go(problem, S & after(S, False))
    out, back = link_seconds(problem, problem.host)
    K = model.variables(after(S, False), name="K", integer=True)
    SSd = model.variables(away, name="SSd", integer=True)
    MOut = model.variables(away, name="MOut", cost=out, integer=True)
    MIn = model.variables(before(away, False), name="MIn", cost=back, integer=True)
    equations.depend_until_freed(model, x)
    equations.keep_or_free(model, x, K)  # values in memory after the ops, before pages move
    for name, first, terms, upper in (
        ("stay or page in", x.S, [(before(K), -1.0), (MIn, -1.0)], 0.0),
        ("page out", MOut, [(before(K), -1.0)], 0.0),
        ("copy", SSd, [(before(SSd), -1.0), (MOut, -1.0)], 0.0),
        ("page in", MIn, [(before(SSd), -1.0)], 0.0),
        ("page out once", MOut, [(before(SSd), 1.0)], 1.0),
        ("page in what is away", MIn, [(before(K), 1.0)], 1.0),
    ):
        pairs(model, name, first, terms, upper=upper)
    # The bytes of both memories.
    unit = equations.size_unit(problem)
    model.constrain("fit there", [(SSd, problem.sizes / unit)], upper=problem.host.budget / unit)
    equations.begin_stage(model, x, problem)
    equations.run_and_free(model, x, problem)
    equations.fit(model, x, problem, budget)
    equations.fit_first_runs(model, replace(x, S=before(K)), problem, budget)
    if x.touches.saved.any():
        equations.write_over(model, x)
        equations.keep_one_copy(model, x)
    equations.run_at_most(model, x.R, problem)
    return model, x.R, MIn
