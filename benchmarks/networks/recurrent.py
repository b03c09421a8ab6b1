"""Recurrent networks: LSTMs as a loop in Python and as modules of PyTorch, and one over a tree."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class HandWrittenLSTM(nn.Module):
    """A long short-term memory (Hochreiter & Schmidhuber 1997), its steps a loop in Python; it reads tokens."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.gates = nn.Linear(2 * width, 4 * width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        hidden = cell = torch.zeros_like(x[:, 0])
        states = []
        for t in range(x.shape[1]):
            i, f, g, o = self.gates(torch.cat([x[:, t], hidden], dim=1)).chunk(4, dim=1)
            cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
            hidden = torch.sigmoid(o) * torch.tanh(cell)
            states.append(hidden)
        return self.head(torch.stack(states, dim=1))


class LibraryLSTM(nn.Module):
    """A language model by `nn.LSTM`, or another recurrent module of PyTorch."""

    def __init__(self, vocabulary: int, width: int, kind: type[nn.RNNBase] = nn.LSTM, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = kind(width, width, batch_first=True, **options)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.layers(self.embedding(tokens))
        return self.head(states)


class Segment(nn.Module):
    """Some tokens of a long short-term memory (Hochreiter & Schmidhuber 1997), its loop over them in Python."""

    def __init__(self, cell: nn.LSTMCell) -> None:
        super().__init__()
        self.cell, self.dropout = cell, nn.Dropout(0.1)

    def forward(self, x: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, tokens, width) -> the same shape, and the state after the last token."""
        states = []
        for token in self.dropout(x).unbind(1):
            hidden, memory = self.cell(token, (hidden, memory))
            states.append(hidden)
        return torch.stack(states, dim=1), hidden, memory


class LSTM(nn.Module):
    """A language model of two recurrent layers; a block is one layer's pass over a segment of the tokens."""

    def __init__(self, vocabulary: int, width: int, segments: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        cells = [nn.LSTMCell(width, width) for _ in range(2)]
        self.layers = nn.ModuleList(nn.ModuleList(Segment(cell) for _ in range(segments)) for cell in cells)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        layers: Any = self.layers
        for layer in layers:
            hidden = memory = torch.zeros_like(x[:, 0])
            out = []
            for segment, part in zip(layer, x.chunk(len(layer), dim=1), strict=True):
                part, hidden, memory = segment(part, hidden, memory)
                out.append(part)
            x = torch.cat(out, dim=1)
        return self.head(x)


class TreeLSTM(nn.Module):
    """A binary tree LSTM (Tai et al. 2015) over one tree, the same for all samples: a graph, though no chain.

    ``tree``: pairs of pairs, whose leaves are the positions of tokens.
    """

    def __init__(self, vocabulary: int, width: int, classes: int, tree: Any) -> None:
        super().__init__()
        self.tree = tree
        self.embedding = nn.Embedding(vocabulary, width)
        self.leaf, self.inner = nn.Linear(width, 3 * width), nn.Linear(2 * width, 5 * width)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self._node(self.tree, self.embedding(tokens))
        return self.head(hidden)

    def _node(self, tree: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(tree, int):
            i, o, u = self.leaf(x[:, tree]).chunk(3, dim=1)
            cell = i.sigmoid() * u.tanh()
            return o.sigmoid() * cell.tanh(), cell
        (left, left_cell), (right, right_cell) = (self._node(child, x) for child in tree)
        i, f, g, o, u = self.inner(torch.cat([left, right], dim=1)).chunk(5, dim=1)
        cell = i.sigmoid() * u.tanh() + f.sigmoid() * left_cell + g.sigmoid() * right_cell
        return o.sigmoid() * F.dropout(cell.tanh(), 0.1, self.training), cell
