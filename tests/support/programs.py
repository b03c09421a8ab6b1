"""Random PyTorch programs: chains, branches, joins, views, writes in place, random ops, integers, dead code.

A program is a list of ops over pools of tensors: numbers, integers, masks. Each op takes what two positions of the
pools name and adds what it makes. `programs()` draws one with hypothesis, which also makes a failing one small.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH = 8, 12  # of every tensor of numbers, whatever its strides
HALF = WIDTH // 2


@dataclass(frozen=True)
class Spec:
    """A program as data: the same spec is the same program, with the same weights."""

    steps: tuple[tuple[str, int, int], ...]  # name of an op, positions of what it reads (modulo the size of the pool)
    seed: int = 0  # of weights and batch
    training: bool = True
    frozen: bool = False  # the first weight needs no gradient
    input_grad: bool = False  # the batch needs one
    extra: str = "none"  # what is returned beside the loss


@dataclass
class Run:
    """A program that runs, and what it has made so far. Ops are given two tensors of numbers, and a whole number."""

    program: Program
    numbers: list[Tensor]  # (ROWS, WIDTH)
    integers: list[Tensor]  # (ROWS,), from 0 to WIDTH - 1
    masks: list[Tensor] = field(default_factory=list)  # (ROWS, WIDTH)

    def index(self, n: int) -> Tensor:
        return self.integers[n % len(self.integers)]


OPS: dict[str, Callable[[Run, Tensor, Tensor, int], Tensor | None]] = {
    # Chains and joins
    "matmul": lambda run, a, b, n: a @ run.program.weights[n % 3],
    "join": lambda run, a, b, n: torch.tanh(a) * b + a,
    "attention": lambda run, a, b, n: torch.softmax(a @ b.t(), dim=-1) @ torch.sigmoid(b),
    "softmax_and_exp": lambda run, a, b, n: F.log_softmax(a, dim=1) + b.clamp(-3, 3).exp().sqrt(),
    "layer_norm": lambda run, a, b, n: F.layer_norm(a, (WIDTH,)) + F.gelu(b),
    "batch_norm": lambda run, a, b, n: run.program.norms[n % 2](a),
    "group_norm": lambda run, a, b, n: F.group_norm(a, 3) * 0.5 + b,
    "convolution": lambda run, a, b, n: F.silu(F.conv1d(a[:, None], run.program.filter, padding=1)).squeeze(1),
    # Several outputs
    "extreme": lambda run, a, b, n: (
        b * (a.max, a.min, a.median, lambda: a.abs().add(0.9).prod(1, keepdim=True))[n % 4]().tanh()
    ),
    "pooled": lambda run, a, b, n: (
        F.max_unpool1d(*F.max_pool1d(a.unsqueeze(1), 2, return_indices=True), 2).squeeze(1) + b
    ),
    # Views
    "transposed": lambda run, a, b, n: (a * 1.1).t().contiguous().t(),
    "window": lambda run, a, b, n: torch.cat([a, b], dim=1)[:, n % 8 : n % 8 + WIDTH],
    "spread": lambda run, a, b, n: a.mean(dim=0).expand(ROWS, WIDTH),
    "alias": lambda run, a, b, n: a.view(ROWS, 2, HALF).view(ROWS, WIDTH) if a.is_contiguous() else a.detach(),
    "product_of_views": lambda run, a, b, n: torch.einsum("rc,sc->rs", a, b)[:, :1] * b,
    # Writes in place
    "in_place": lambda run, a, b, n: (a + 0.5).add_(b).relu_(),
    "scatter": lambda run, a, b, n: a.clone().scatter_add_(1, run.index(n).unsqueeze(1), b[:, :1]),
    "write_by_index": lambda run, a, b, n: a.index_put((run.index(n) % ROWS,), b, accumulate=True),
    # Random numbers
    "dropout": lambda run, a, b, n: F.dropout(a.clamp(max=3.0), 0.1 + 0.1 * (n % 9), run.program.training),
    "dropout_in_place": lambda run, a, b, n: F.dropout(a * 1.2, 0.3, run.program.training, inplace=True),
    "dropout_of_channels": lambda run, a, b, n: F.dropout1d(
        a.view(ROWS, 3, 4) if a.is_contiguous() else a.reshape(ROWS, 3, 4), 0.3
    ).reshape(ROWS, WIDTH),
    "alpha_dropout": lambda run, a, b, n: F.alpha_dropout(F.selu(a), 0.2, run.program.training),
    "noise": lambda run, a, b, n: a + 0.1 * (torch.rand_like(a) + torch.randn(WIDTH)) * torch.sigmoid(b),
    "random_in_place": lambda run, a, b, n: torch.empty_like(a).normal_(0.0, 0.1) * b + torch.zeros_like(b).uniform_(),
    "random_leaky_relu": lambda run, a, b, n: F.rrelu(a.contiguous(), training=run.program.training),
    # Integers and masks
    "lookup": lambda run, a, b, n: run.program.table(run.index(n)) * torch.softmax(b, dim=1),
    "one_hot": lambda run, a, b, n: F.one_hot(run.index(n), WIDTH).to(a.dtype) * a,
    "cross_entropy": lambda run, a, b, n: b * F.cross_entropy(a, run.index(n)),
    # Without gradient
    "detached": lambda run, a, b, n: a.detach() * b,
}


class _Ops:
    """Ops of several lines."""

    # Chains and joins

    def half_precision(run: Run, a: Tensor, b: Tensor, n: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.relu(a @ run.program.weights[n % 3]).float()

    def checkpointed(run: Run, a: Tensor, b: Tensor, n: int) -> Tensor:
        return checkpoint(lambda u: torch.sin(u @ run.program.weights[1]) * u, a, use_reentrant=False)

    # Several outputs

    def sorted(run: Run, a: Tensor, b: Tensor, n: int) -> Tensor:
        values, indices = a.sort(dim=1)
        return values + b.gather(1, indices)

    def largest(run: Run, a: Tensor, b: Tensor, n: int) -> Tensor:
        largest, where = a.max(dim=1, keepdim=True)
        run.integers.append(where.squeeze(1))
        return b - largest

    def mean_and_deviation(run: Run, a: Tensor, b: Tensor, n: int) -> Tensor:
        variance, mean = torch.var_mean(a, dim=0, keepdim=True)
        return (b - mean) * torch.rsqrt(variance + 1e-3)

    def parts(run: Run, a: Tensor, b: Tensor, n: int) -> Tensor:
        first, second, third = a.split([2, 4, 6], dim=1)
        run.numbers.append(torch.cat([third, b[:, :6]], dim=1))
        return torch.cat([second, first, third], dim=1)

    def rows(run: Run, a: Tensor, b: Tensor, n: int) -> Tensor:
        rows = a.unbind(0)
        return torch.stack([*rows[1:], rows[0] * b[0]])

    # Views

    def views(run: Run, a: Tensor, b: Tensor, n: int) -> Tensor:
        left, right = (a + b).t().contiguous().t().chunk(2, dim=1)
        return torch.cat([right, left.flip(1)], dim=1).view(ROWS, 3, 4).transpose(1, 2).reshape(ROWS, WIDTH)

    # Writes in place

    def write_a_view(run: Run, a: Tensor, b: Tensor, n: int) -> Tensor:
        copy = a * 0.9
        copy[:, 2:6] = b[:, 2:6]
        copy[0].mul_(2)
        return copy

    def write_where_it_lies(run: Run, a: Tensor, b: Tensor, n: int) -> Tensor:
        """Write in the strides of what is there."""
        copy = a * 1.1
        part = (copy, copy[:, 2:9], copy[:, ::2], copy.t())[n % 4]
        rows = run.index(n)[:4] % len(part)
        other = b[: len(part), : part.shape[1]] if n % 4 < 3 else b.t()
        (
            lambda: part.masked_fill_(other > 0.3, 0.5),
            lambda: part.index_add_(0, rows, other[:4], alpha=0.3),
            lambda: part.cumsum_(1),
            lambda: part.addmm_(other[:, :3], other[:3], beta=0.7),
            lambda: part.addcmul_(other, other, value=0.3),
            lambda: part.add_(other).sigmoid_(),
            lambda: part.scatter_(0, rows.unsqueeze(1), other[:4]),
        )[n % 7]()
        return copy * part.sum()

    def write_what_was_read(run: Run, a: Tensor, b: Tensor, n: int) -> Tensor:
        copy = a + b
        read = copy * 3
        copy.add_(1)
        return read * 0.5 + copy.sin()

    def count_calls(run: Run, a: Tensor, b: Tensor, n: int) -> Tensor:
        if run.program.training:
            run.program.calls += a.detach().mean()
        return a * 1.1

    def running_average(run: Run, a: Tensor, b: Tensor, n: int) -> Tensor:
        seen = run.program.average.clone()
        with torch.no_grad():
            run.program.average.lerp_(a.mean(dim=0), 0.1)
        return a - seen

    def write_the_input(run: Run, a: Tensor, b: Tensor, n: int) -> None:
        if not run.numbers[0].requires_grad:
            run.numbers[0].mul_(0.99)

    # Random numbers

    def random_rows(run: Run, a: Tensor, b: Tensor, n: int) -> Tensor:
        run.integers.append(torch.randint(WIDTH, (ROWS,)))
        return a[torch.randperm(ROWS)]

    def random_in_a_part(run: Run, a: Tensor, b: Tensor, n: int) -> Tensor:
        noise = torch.zeros_like(a)
        part = noise[:, 1:8] if n % 2 else noise.t()
        (part.normal_, part.uniform_, part.bernoulli_, part.exponential_)[n % 4]()
        return b * noise

    def random_mask(run: Run, a: Tensor, b: Tensor, n: int) -> Tensor:
        run.masks.append(torch.bernoulli(torch.full_like(a, 0.7)).bool())
        return a.masked_fill(run.masks[-1], 0.0)

    def attention_with_dropout(run: Run, a: Tensor, b: Tensor, n: int) -> Tensor:
        q, k = a.reshape(1, 2, ROWS, HALF), b.reshape(1, 2, ROWS, HALF)
        p = 0.2 if run.program.training and n % 2 else 0.0
        return F.scaled_dot_product_attention(q, k, k, dropout_p=p, is_causal=n % 3 == 0).reshape(ROWS, WIDTH)

    # Integers and masks

    def arguments(run: Run, a: Tensor, b: Tensor, n: int) -> None:
        run.integers.append((a.argmax(dim=1) + run.integers[-1]) % WIDTH)

    def compared(run: Run, a: Tensor, b: Tensor, n: int) -> Tensor:
        run.masks.append(a > b)
        return torch.where(run.masks[-1], a, 0.5 * b)

    def masked(run: Run, a: Tensor, b: Tensor, n: int) -> Tensor:
        mask = run.masks[n % len(run.masks)] if run.masks else b > 2
        return a.masked_fill(mask, 0.0) + (~mask).to(a.dtype).cumsum(dim=1)

    # Without gradient

    def without_gradient(run: Run, a: Tensor, b: Tensor, n: int) -> Tensor:
        with torch.no_grad():
            scale = a.abs().amax(dim=1, keepdim=True) + 1
        return b / scale

    def dead_code(run: Run, a: Tensor, b: Tensor, n: int) -> None:
        (a @ b.t()).softmax(dim=0).sum()
        torch.rand(3)  # nobody reads it, yet what is drawn after it differs without it


OPS |= {name: op for name, op in vars(_Ops).items() if not name.startswith("_")}
EXTRAS: dict[str, Callable[[Run, Tensor], Tensor]] = {  # beside the loss
    "number": lambda run, loss: run.numbers[-1],
    "view": lambda run, loss: run.numbers[-1][:, :HALF],
    "integer": lambda run, loss: run.integers[-1],
    "input": lambda run, loss: run.numbers[0],
    "detached": lambda run, loss: run.numbers[-1].detach(),
    "scaled": lambda run, loss: loss * 2,
}


class Program(nn.Module):
    """The module of a spec; its forward returns the loss, or the loss and something else."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(spec.seed)
        weights = [0.3 * torch.randn(WIDTH, WIDTH, generator=draw) for _ in range(3)]
        self.weights = nn.ParameterList([nn.Parameter(w) for w in weights])
        self.weights[0].requires_grad_(not spec.frozen)
        self.table = nn.Embedding(WIDTH, WIDTH, _weight=torch.randn(WIDTH, WIDTH, generator=draw))
        self.norms = nn.ModuleList([nn.BatchNorm1d(WIDTH) for _ in range(2)])
        self.filter = nn.Parameter(0.3 * torch.randn(1, 1, 3, generator=draw))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.spec = spec
        self.steps = [(OPS[name], i, j) for name, i, j in spec.steps]
        self.train(spec.training)

    def forward(self, x: Tensor, index: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        run = Run(self, [x, x @ self.weights[0], self.weights[1][:ROWS] * 1.5], [index])
        numbers = run.numbers
        for op, i, j in self.steps:
            made = op(run, numbers[-1 - i % len(numbers)], numbers[-1 - j % len(numbers)], i + j)
            if made is not None:
                numbers.append(made)
        numbers[0].cos()  # dead code
        loss = sum((t * t).mean() for t in numbers[-2:]) + numbers[1].mean() + (self.weights[2] ** 2).mean()
        return loss if self.spec.extra == "none" else (loss, EXTRAS[self.spec.extra](run, loss))


def batch(spec: Spec) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(spec.seed + 1)
    x = torch.randn(ROWS, WIDTH, generator=draw)
    return x.requires_grad_(spec.input_grad), torch.randint(WIDTH, (ROWS,), generator=draw)


def programs(max_steps: int = 5) -> st.SearchStrategy[Spec]:
    """Specs of up to so many steps. Positions count from what was made last, so that small ones make chains."""
    position = st.integers(0, 5)
    step = st.tuples(st.sampled_from(sorted(OPS)), position, position)
    return st.builds(
        Spec,
        steps=st.lists(step, min_size=1, max_size=max_steps).map(tuple),
        seed=st.integers(0, 99),
        training=st.sampled_from([True, True, True, False]),
        frozen=st.booleans(),
        input_grad=st.booleans(),
        extra=st.sampled_from(["none", "none", "none", *EXTRAS]),
    )
