"""Which dimension of what an op reads is which of what it makes, by letters as in einsum: for `splits.table`."""

from __future__ import annotations

import math
import string
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.fx as fx

aten = torch.ops.aten


class Letters(NamedTuple):
    """Of an op's arguments and results."""

    read: list[tuple[Any, str]]
    made: list[str]


Rule = str | Callable[[Any, int], str | Letters | None]  # of a node and the units; None: there are no parts


def values_of(node: fx.Node) -> tuple[Any, ...]:
    """The fake results of a node, one or several."""
    val = node.meta["val"]
    return tuple(val) if isinstance(val, (tuple, list)) else (val,)


def rank_of(node: Any) -> int:
    """How many dimensions what a node makes has."""
    rank: int = node.meta["val"].dim()
    return rank


def _shape_of(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _alphabet(rank: int) -> str:
    return string.ascii_lowercase[:rank]


def but(letters: str, *dims: int, by: str = ".") -> str:
    """Without those of some dimensions."""
    some = {d % len(letters) for d in dims}
    return "".join(by if d in some else letter for d, letter in enumerate(letters))


def _broadcast(node: Any, of: tuple[int, ...], letters: str) -> str:
    """Of an argument that is broadcast to a shape: where that is done it is the same for all parts."""
    if not isinstance(node, fx.Node):
        return ""
    shape = _shape_of(node)
    own = zip(shape, of[len(of) - len(shape) :], letters[len(of) - len(shape) :], strict=True)
    return "".join(letter if size != 1 or whole == 1 else "." for size, whole, letter in own)


def moved(change: Callable[[Any, str], str], *, reads: int = 1, summed: bool = False) -> Rule:
    """For an op whose first arguments have the same dimensions: what becomes of their letters.

    What a result lacks is not split, unless it is ``summed`` over.
    """

    def rule(node: Any, units: int) -> Letters:
        letters = _alphabet(rank_of(node.args[0]))
        made = change(node, letters) if letters else ""
        read = letters if summed else "".join(letter if letter in made else "." for letter in letters)
        return Letters([(n, read) for n in node.args[:reads]], [made] * len(values_of(node)))

    return rule


def apart_from(position: int, default: int | None = None) -> Callable[[Any, str], str]:
    """For ops along a dimension, which is their argument at a position: any other may be split."""

    def change(node: Any, letters: str) -> str:
        along = node.args[position] if len(node.args) > position else default
        return "" if along is None else but(letters, along)

    return change


def transposed(node: Any, letters: str) -> str:
    """Two dimensions are in each other's place."""
    made = [*letters]
    one, other = node.args[1:] or (0, len(made) - 1)
    made[one], made[other] = made[other], made[one]
    return "".join(made)


def unsqueezed(node: Any, letters: str) -> str:
    """One dimension more."""
    at = node.args[1] % (len(letters) + 1)
    return f"{letters[:at]}.{letters[at:]}"


def squeezed(node: Any, letters: str) -> str:
    """Without dimensions of one."""
    given = node.args[1] if len(node.args) > 1 else range(len(letters))
    shape = _shape_of(node.args[0])
    return but(letters, *(d for d in ([given] if isinstance(given, int) else given) if shape[d] == 1), by="")


def reduced(node: Any, letters: str) -> str:
    """Without some dimensions or all."""
    given = (node.args[1] if len(node.args) > 1 else None) or range(len(letters))
    return but(letters, *given, by="." if len(node.args) > 2 and node.args[2] else "")


def planes(node: Any, letters: str) -> str:
    """Of images and their channels, one by one."""
    return letters[:2] if len(letters) == 4 else ""


def viewed(node: Any, units: int) -> str:
    """A dimension is in the same elements in another shape where as many stand before it."""
    shape, source = _shape_of(node), _shape_of(node.args[0])
    made, read = ["."] * len(shape), ["."] * len(source)
    for d, letter in enumerate(_alphabet(len(shape))):
        for at, size in enumerate(source):
            as_many = math.prod(source[:at]) == math.prod(shape[:d])
            if as_many and all(n >= units and n % units == 0 for n in (size, shape[d])):
                made[d] = read[at] = letter
                break
    return f"{''.join(read)}->{''.join(made)}"


def pointwise(node: Any, units: int) -> Letters:
    """Each element is made of the same element of the arguments, broadcast."""
    of = _shape_of(node)
    return Letters([(n, _broadcast(n, of, _alphabet(len(of)))) for n in node.all_input_nodes], [_alphabet(len(of))])


def with_bias(node: Any, units: int) -> str:
    """A product of matrices, or of batches of them."""
    of = _shape_of(node)
    batch = "b" * (len(of) - 2)
    return f"{_broadcast(node.args[0], of, f'{batch}ij')},{batch}i.,{batch}.j->{batch}ij"


def cat(node: Any, units: int) -> Letters:
    """Beside tensors of more dimensions one of shape (0,) adds nothing, and is read as it is."""
    letters = but(_alphabet(rank_of(node)), node.args[1] if len(node.args) > 1 else 0)
    return Letters([(n, letters if rank_of(n) == len(letters) else "") for n in node.all_input_nodes], [letters])


def without_sums(node: Any, units: int) -> Letters:
    """Of a batch norm: along any dimension, and numbers of the channels with these."""
    letters = _alphabet(rank_of(node))
    return Letters([(n, letters if rank_of(n) > 1 else letters[1]) for n in node.all_input_nodes], [letters])


def gradients(node: Any, read: str, *made: str) -> str:
    """Of those that are asked for."""
    return f"{read}->{','.join(text if one else f'-{text}' for text, one in zip(made, node.args[-1], strict=True))}"


def layer_norm_backward(node: Any, units: int) -> str:
    """By rows."""
    rows = _alphabet(rank_of(node.args[0]) - len(node.args[2]))
    return gradients(node, f"{rows},{rows},,{rows},{rows}", rows, "", "")


def batch_norm_backward(node: Any, units: int) -> str:
    """By channels; over images, if it makes nothing but sums."""
    *_, training, _, wanted = node.args
    x = "nc" if training and not wanted[0] else ".c"
    return gradients(node, f"{x},{x},c,c,c,c,c", ".c", "c", "c")


def convolution(node: Any, units: int) -> str:
    """By images, and by outputs or groups of channels."""
    *_, is_transposed, _, groups = node.args
    if groups != 1:
        return "n->n" if is_transposed or groups % units else "ng,g,g->ng"
    return "n,.o,o->no" if is_transposed else "n,o,o->no"


def _of_input(is_transposed: bool, groups: int, units: int) -> tuple[str, str, str]:
    """Of the gradient of a convolution's result, its weight, and the gradient of its input."""
    if groups != 1:
        return ("n", "", "n") if is_transposed or groups % units else ("ng", "g", "ng")
    return "n", "c" if is_transposed else ".c", "nc"


def convolution_backward_input(node: Any, units: int) -> str:
    """By images and channels."""
    *_, is_transposed, _, groups = node.args
    return "{},{}->{}".format(*_of_input(is_transposed, groups, units))


def convolution_backward(node: Any, units: int) -> str:
    """The gradient of the input, or that of the weight by its outputs or its inputs; over images else."""
    *_, is_transposed, _, groups, wanted = node.args
    if wanted == [True, False, False]:
        grad, w, x = _of_input(is_transposed, groups, units)
        return gradients(node, f"{grad},~{x},{w}", x, "", "")
    if wanted[0] or is_transposed or (groups != 1 and groups % units):
        return gradients(node, "n,n", "n", "", "")
    if groups != 1:
        return gradients(node, "ng,ng,g", "", "g", "g")
    c = "." if wanted[2] else "c"
    return gradients(node, f"no,n{c},o{c}", "", f"o{c}", "o")


def attention(count: int, results: int) -> Rule:
    """Scaled dot product attention by batches or heads; the first so many arguments have both."""

    def rule(node: Any, units: int) -> Letters:
        mask = node.kwargs.get("attn_mask")
        of_mask = _broadcast(mask, (*_shape_of(node.args[0])[:3], 2), "bh..")
        return Letters([*((x, "bh") for x in node.args[:count]), (mask, of_mask)], ["bh"] * results)

    return rule


def embedding(node: Any, units: int) -> str:
    """By places and by columns."""
    places = _alphabet(rank_of(node) - 1)
    return f".z,{places}->{places}z"


def nll_loss2d_backward(node: Any, units: int) -> str:
    """By images, rows or columns, which targets have and, if it is not one number, the gradient of the loss."""
    grad, _, target, *_ = node.args
    return f"{'nhw' if _shape_of(grad) == _shape_of(target) else ''},n.hw,nhw->n.hw"
