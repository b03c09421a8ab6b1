"""Nested lists, tuples and dictionaries as PyTorch takes them apart: `torch.utils._pytree`."""

from __future__ import annotations

from checkmate.torch_internals.names import Name, Table

_PLACE = "torch.utils._pytree"
NAMES = Table(
    Name("keystr", _PLACE, "the place of a leaf, in words", "steps are not verified"),
    Name("tree_flatten", _PLACE, "the leaves, and the structure", "LSTMs are not captured"),
    Name("tree_flatten_with_path", _PLACE, "the leaves with their places"),
    Name("tree_leaves", _PLACE, "the tensors among arguments and results"),
    Name("tree_map", _PLACE, "the same structure of other leaves"),
    Name("tree_map_only", _PLACE, "the same structure, with the tensors replaced"),
    Name("tree_unflatten", _PLACE, "the structure with other leaves", "LSTMs are not captured"),
)
__getattr__ = NAMES.get
