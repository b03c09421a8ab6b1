"""Training steps without PyTorch: seeded problems with the shape of real ones, for tests and measurements.

A `Tape` records a forward and derives the backward from it, op by op, as autograd does: gradients of a value that is
read several times are added up, and gradients of weights are results of the step. Times follow a roofline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from checkmate.core.graph import Graph, Op, Phase, Value
from checkmate.core.problem import Problem, Profile

FLOPS = 1e12  # a second
BYTES = 1e11  # a second
LATENCY = 2e-6  # seconds an op takes at least


def unit_chain(layers: int) -> Problem:
    """The chain of the golden optima: unit costs and sizes, op i reads i - 1, op 2L - i also reads i."""
    n = 2 * layers + 1
    deps = [[k - 1] if k else [] for k in range(n)]
    for i in range(layers):
        if 2 * layers - i - 1 != i:
            deps[2 * layers - i].append(i)
    return Problem.from_dag(deps, [1.0] * n, [1] * n, outputs=[n - 1], forward=layers + 1)


@dataclass
class Tape:
    """A forward being recorded, with what its backward will do."""

    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    workspace: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    resident: int = 0
    phase: Phase = "forward"
    backward: list[Callable[[], None]] = field(default_factory=list)
    grads: dict[int, int] = field(default_factory=dict)  # value -> its gradient so far

    def run(
        self, target: str, inputs: list[int], sizes: list[int],
        *, flops: float = 0.0, workspace: int = 0, pinned: str | None = None,
    ) -> list[int]:  # fmt: skip
        """Append an op; the values it makes."""
        k = len(self.ops)
        outputs = list(range(len(self.values), len(self.values) + len(sizes)))
        self.values += [Value(f"{target}_{k}.{i}", int(size), k) for i, size in enumerate(sizes)]
        read = tuple(sorted(set(inputs)))
        self.ops.append(Op(f"{target}_{k}", target, read, tuple(outputs), self.phase, pinned))
        moved = sum(self.values[v].size_bytes for v in read) + sum(sizes)
        self.seconds.append(LATENCY + max(flops / FLOPS, moved / BYTES))
        self.workspace.append(int(workspace))
        return outputs

    def size(self, v: int) -> int:
        return self.values[v].size_bytes

    def send(self, v: int, grad: int) -> None:
        """Add a gradient to those of v."""
        if v in self.grads:
            (grad,) = self.run("add", [self.grads[v], grad], [self.size(v)])
        self.grads[v] = grad

    def problem(self, loss_of: int) -> Problem:
        """Close the forward with a loss, run the backward, and hand out the problem."""
        (loss,) = self.run("loss", [loss_of], [4])
        self.results.append(loss)
        self.phase = "backward"
        self.grads[loss_of] = self.run("loss_backward", [loss_of], [self.size(loss_of)])[0]
        for step in reversed(self.backward):
            step()
        graph = Graph(tuple(self.ops), tuple(self.values), tuple(self.results))
        return Problem(graph, Profile(np.array(self.seconds), np.array(self.workspace), self.resident, "roofline"))

    def layer(
        self, target: str, x: int, sizes: list[int],
        *, saves: str = "x", flops: float = 0.0, weights: int = 0, workspace: int = 0, pinned: str | None = None,
    ) -> list[int]:  # fmt: skip
        """An op of one input whose backward reads the gradient and what it saves: x (input), y (first), rest."""
        outputs = self.run(target, [x], sizes, flops=flops, workspace=workspace, pinned=pinned)
        saved = [x] * ("x" in saves) + outputs[:1] * ("y" in saves) + outputs[1:] * ("r" in saves)
        self.resident += weights

        def step() -> None:
            read, made = [self.grads.pop(outputs[0]), *saved], [self.size(x)] + [weights] * (weights > 0)
            grad, *of_weights = self.run(f"{target}_backward", read, made, flops=2 * flops, workspace=workspace)
            self.results += of_weights
            self.send(x, grad)

        self.backward.append(step)
        return outputs

    def linear(self, x: int, rows: int, n_in: int, n_out: int) -> int:
        """A matrix product with weights; its backward is two products."""
        (y,) = self.run("mm", [x], [4 * rows * n_out], flops=2.0 * rows * n_in * n_out)
        self.resident += 4 * n_in * n_out

        def step() -> None:
            grad = self.grads.pop(y)
            self.results += self.run("mm_weight", [grad, x], [4 * n_in * n_out], flops=2.0 * rows * n_in * n_out)
            self.send(x, self.run("mm_input", [grad], [self.size(x)], flops=2.0 * rows * n_in * n_out)[0])

        self.backward.append(step)
        return y

    def join(self, target: str, a: int, b: int, size: int) -> int:
        """Add or concatenate: the gradient goes to both as it is (a view)."""
        (y,) = self.run(target, [a, b], [size])

        def step() -> None:
            grad = self.grads.pop(y)
            self.send(a, grad)
            self.send(b, grad)

        self.backward.append(step)
        return y

    def conv(self, x: int, c_in: int, c_out: int, pixels: int, *, kernel: int = 9, groups: int = 1) -> int:
        """A convolution to c_out channels of this many pixels (batch included), with a workspace."""
        flops = 2.0 * pixels * c_in * c_out * kernel / groups
        weights = 4 * c_in * c_out * kernel // groups
        return self.layer("conv", x, [4 * c_out * pixels], flops=flops, weights=weights, workspace=weights // 2)[0]

    def norm(self, x: int, channels: int) -> int:
        """A batch or layer norm: an output and two small statistics, which its backward reads."""
        return self.layer("norm", x, [self.size(x), 4 * channels, 4 * channels], saves="xr", weights=8 * channels)[0]

    def relu(self, x: int) -> int:
        """A rectifier; its backward reads its output."""
        return self.layer("relu", x, [self.size(x)], saves="y")[0]

    def pool(self, x: int) -> int:
        """Max-pool by two: an output and indices."""
        return self.layer("pool", x, [self.size(x) // 4, self.size(x) // 2], saves="xr")[0]

    def dropout(self, x: int) -> int:
        """Dropout: an output and a mask that cannot be drawn again."""
        return self.layer("dropout", x, [self.size(x), self.size(x) // 4], saves="r", pinned="draws random numbers")[0]


def vgg(depth: int = 16, batch: int = 32, image: int = 96) -> Problem:
    """A chain of convolutions and rectifiers with pools; 16 convolutions make 80 ops."""
    tape, pixels, channels = Tape(), batch * image * image, 3
    (x,) = tape.run("load", [], [4 * 3 * pixels])
    for i in range(depth):
        wide = min(512, 64 * 2 ** (4 * i // depth))
        x = tape.relu(tape.conv(x, channels, wide, pixels))
        channels = wide
        if (i + 1) % max(1, depth // 5) == 0 and pixels > 4 * batch:
            x, pixels = tape.pool(x), pixels // 4
    return tape.problem(tape.linear(x, batch, channels, 1000))


def resnet(blocks: tuple[int, ...] = (2, 2, 2, 2), batch: int = 64, image: int = 96, *, wide: int = 64) -> Problem:
    """Residual blocks with batch norms; (2, 2, 2, 2) is the shape of ResNet-18, about 140 ops."""
    tape, pixels = Tape(), batch * image * image // 4
    (x,) = tape.run("load", [], [4 * 3 * 4 * pixels])
    x = tape.pool(tape.relu(tape.norm(tape.conv(x, 3, wide, pixels, kernel=49), wide)))
    pixels, channels = pixels // 4, wide
    for stage, count in enumerate(blocks):
        for block in range(count):
            c_out = wide * 2**stage
            if stage and not block:
                pixels //= 4
            y = tape.relu(tape.norm(tape.conv(x, channels, c_out, pixels), c_out))
            y = tape.norm(tape.conv(y, c_out, c_out, pixels), c_out)
            if c_out != channels:
                x = tape.norm(tape.conv(x, channels, c_out, pixels, kernel=1), c_out)
            x, channels = tape.relu(tape.join("add", y, x, tape.size(y))), c_out
    return tape.problem(tape.linear(x, batch, channels, 1000))


def mobilenet(blocks: int = 17, batch: int = 32, image: int = 64) -> Problem:
    """Inverted residuals: thin, wide, depthwise, thin; 17 blocks make about 310 ops."""
    tape, pixels, thin = Tape(), batch * image * image // 4, 16
    (x,) = tape.run("load", [], [4 * 3 * 4 * pixels])
    x = tape.relu(tape.norm(tape.conv(x, 3, thin, pixels), thin))
    for block in range(blocks):
        grow = block in (1, 4, 9)
        c_out, out_pixels = (thin * 2, pixels // 4) if grow else (thin, pixels)
        y = tape.relu(tape.norm(tape.conv(x, thin, 6 * thin, pixels, kernel=1), 6 * thin))
        y = tape.relu(tape.norm(tape.conv(y, 6 * thin, 6 * thin, out_pixels, groups=6 * thin), 6 * thin))
        y = tape.norm(tape.conv(y, 6 * thin, c_out, out_pixels, kernel=1), c_out)
        x = y if grow else tape.join("add", x, y, tape.size(y))
        thin, pixels = c_out, out_pixels
    return tape.problem(tape.linear(x, batch, thin, 1000))


def unet(depth: int = 4, batch: int = 4, image: int = 128, *, wide: int = 32) -> Problem:
    """Down with pools, up with a skip from each level; depth 4 makes about 140 ops."""
    tape, pixels = Tape(), batch * image * image
    (x,) = tape.run("load", [], [4 * 3 * pixels])
    channels, skips = 3, []
    for level in range(depth + 1):
        c_out = wide * 2**level
        for _ in range(2):
            x, channels = tape.relu(tape.norm(tape.conv(x, channels, c_out, pixels), c_out)), c_out
        if level < depth:
            skips.append(x)
            x, pixels = tape.pool(x), pixels // 4
    for level in reversed(range(depth)):
        c_out, pixels = wide * 2**level, pixels * 4
        up = tape.conv(x, channels, c_out, pixels, kernel=4)
        x, channels = tape.join("cat", skips[level], up, tape.size(up) * 2), 2 * c_out
        for _ in range(2):
            x, channels = tape.relu(tape.norm(tape.conv(x, channels, c_out, pixels), c_out)), c_out
    return tape.problem(tape.conv(x, channels, 2, pixels, kernel=1))


def gpt(layers: int = 12, batch: int = 4, tokens: int = 256, *, wide: int = 256, drop: bool = True) -> Problem:
    """Transformer blocks with attention and dropout (pinned); 12 layers make about 490 ops."""
    tape, rows, heads = Tape(), batch * tokens, max(1, wide // 64)
    (x,) = tape.run("embed", [], [4 * rows * wide])
    x = tape.dropout(x) if drop else x
    for _ in range(layers):
        y = _attention(tape, tape.norm(x, rows), batch, tokens, wide, heads, drop)
        y = tape.linear(y, rows, wide, wide)
        x = tape.join("add", x, tape.dropout(y) if drop else y, tape.size(x))
        y = tape.linear(tape.norm(x, rows), rows, wide, 4 * wide)
        y = tape.linear(tape.layer("gelu", y, [tape.size(y)], saves="x")[0], rows, 4 * wide, wide)
        x = tape.join("add", x, tape.dropout(y) if drop else y, tape.size(x))
    logits = tape.linear(tape.norm(x, rows), rows, wide, 8 * wide)
    return tape.problem(tape.layer("log_softmax", logits, [tape.size(logits)], saves="y")[0])


def _attention(tape: Tape, x: int, batch: int, tokens: int, wide: int, heads: int, drop: bool) -> int:
    rows = batch * tokens
    qkv = tape.linear(x, rows, wide, 3 * wide)
    flops, scores = 2.0 * rows * tokens * wide, 4 * batch * heads * tokens * tokens
    q, k, v = (tape.run("copy", [qkv], [4 * rows * wide])[0] for _ in range(3))
    (raw,) = tape.run("bmm", [q, k], [scores], flops=flops)
    (p,) = tape.run("softmax", [raw], [scores])

    def to_queries_and_keys() -> None:
        (grad,) = tape.run("softmax_backward", [tape.grads.pop(p), p], [scores])
        (gq,) = tape.run("bmm_q", [grad, k], [tape.size(q)], flops=flops)
        (gk,) = tape.run("bmm_k", [grad, q], [tape.size(k)], flops=flops)
        tape.send(qkv, tape.run("cat", [gq, gk, tape.grads.pop(v)], [tape.size(qkv)])[0])

    tape.backward.append(to_queries_and_keys)
    weights = tape.dropout(p) if drop else p
    (y,) = tape.run("bmm", [weights, v], [4 * rows * wide], flops=flops)

    def to_weights_and_values() -> None:
        grad = tape.grads.pop(y)
        tape.grads[v] = tape.run("bmm_v", [grad, weights], [tape.size(v)], flops=flops)[0]
        tape.send(weights, tape.run("bmm_p", [grad, v], [scores], flops=flops)[0])

    tape.backward.append(to_weights_and_values)
    return y


SHAPES: dict[str, Callable[[], Problem]] = {shape.__name__: shape for shape in (vgg, resnet, mobilenet, unet, gpt)}
