"""A linear model held as arrays: families of variables, families of constraints, each with a name.

A family of variables is an integer array of column numbers in whatever shape the equation has (``R[t, k]``), with
`NONE` where there is no variable, which stands for zero. A family of constraints is a set of rows of equal form, so
that an equation of the paper is one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import scipy.sparse as sp

NONE = -1  # in an array of columns: no variable here, zero
INF = float("inf")

Numbers = np.ndarray | float  # one for each row or column, or one for all
Term = tuple[np.ndarray, Numbers]  # columns, coefficients
Entry = tuple[np.ndarray, np.ndarray, Numbers]  # rows, columns, coefficients


@dataclass(frozen=True, eq=False)
class Row:
    """One constraint: Σ coefficient · column <= upper."""

    columns: np.ndarray
    coefficients: np.ndarray
    upper: float
    source: object = None  # what it was made from


@dataclass
class Model:
    """min cost @ x, subject to lower <= A x <= upper by family, and bounds and integrality by variable.

    >>> model = Model()
    >>> x = model.variables((3,), cost=[1.0, 2.0, 3.0])
    >>> model.constrain("cover", [(x[:2], 1.0), (x[1:], 1.0)], lower=1.0)  # x0 + x1 >= 1, x1 + x2 >= 1
    >>> model.matrix().toarray()
    array([[1., 1., 0.],
           [0., 1., 1.]])
    """

    columns: int = 0
    rows: int = 0
    families: dict[str, slice] = field(default_factory=dict)  # name of each family of constraints -> its rows
    _cost: list[np.ndarray] = field(default_factory=list)
    _lower: list[np.ndarray] = field(default_factory=list)
    _upper: list[np.ndarray] = field(default_factory=list)
    _integer: list[np.ndarray] = field(default_factory=list)
    _row_lower: list[np.ndarray] = field(default_factory=list)
    _row_upper: list[np.ndarray] = field(default_factory=list)
    _entries: list[Entry] = field(default_factory=list)
    _named: list[tuple[str, np.ndarray]] = field(default_factory=list)  # each family of variables: name and mask

    def variables(
        self,
        shape: tuple[int, ...] | np.ndarray,
        *,
        lower: float | np.ndarray = 0.0,
        upper: float | np.ndarray = 1.0,
        cost: float | np.ndarray | list[float] = 0.0,
        integer: bool = False,
        name: str | None = None,
    ) -> np.ndarray:
        """Add columns of the given shape, or one where a bool array is True and `NONE` elsewhere.

        ``lower``, ``upper`` and ``cost`` broadcast to the shape. ``name`` is for files that people read.
        """
        mask = shape if isinstance(shape, np.ndarray) else np.ones(shape, dtype=bool)
        count = int(mask.sum())
        family = np.full(mask.shape, NONE, dtype=np.int64)
        family[mask] = np.arange(self.columns, self.columns + count)
        for store, values in ((self._lower, lower), (self._upper, upper), (self._cost, cost)):
            store.append(np.broadcast_to(np.asarray(values, dtype=np.float64), mask.shape)[mask])
        self._integer.append(np.full(count, integer))
        self._named.append((name or f"x{len(self._named)}", mask))
        self.columns += count
        return family

    def constrain(self, name: str, terms: Sequence[Term], *, lower: Numbers = -INF, upper: Numbers = INF) -> None:
        """Add one row per entry of the terms: lower <= Σ coefficient · variable <= upper.

        Args:
            terms: pairs of columns and coefficients. All columns have the same leading axis, a row each; further axes
                are summed over. `NONE` is left out.
            lower, upper: a number, or one for each row.
        """
        own = np.arange(len(terms[0][0]))
        entries = [
            (np.broadcast_to(own.reshape(-1, *[1] * (columns.ndim - 1)), columns.shape), columns, coefficients)
            for columns, coefficients in terms
        ]
        self.constrain_sparse(name, len(own), entries, lower=lower, upper=upper)

    def constrain_sparse(
        self, name: str, count: int, entries: Sequence[Entry], *, lower: Numbers = -INF, upper: Numbers = INF
    ) -> None:
        """Add ``count`` rows with any number of terms: entries are (row within the family, column, coefficient)."""
        if name in self.families:
            raise ValueError(f"There is a family of constraints named {name!r} already.")
        for rows, columns, coefficients in entries:
            coefficients = np.broadcast_to(np.asarray(coefficients, dtype=np.float64), columns.shape)
            mask = columns != NONE
            self._entries.append((self.rows + rows[mask], columns[mask], coefficients[mask]))
        self._row_lower.append(np.broadcast_to(np.asarray(lower, dtype=np.float64), (count,)))
        self._row_upper.append(np.broadcast_to(np.asarray(upper, dtype=np.float64), (count,)))
        self.families[name] = slice(self.rows, self.rows + count)
        self.rows += count

    def constrain_rows(self, name: str, rows: Sequence[Row]) -> None:
        """Add rows that were made one by one."""
        entries = [(np.full(len(row.columns), i), row.columns, row.coefficients) for i, row in enumerate(rows)]
        self.constrain_sparse(name, len(rows), entries, upper=np.array([row.upper for row in rows]))

    def matrix(self) -> sp.csc_array:
        """(rows, columns): the coefficients; repeated entries are added up."""
        if not self._entries:
            return sp.csc_array((self.rows, self.columns))
        rows, columns, coefficients = (np.concatenate(parts) for parts in zip(*self._entries, strict=True))
        matrix = sp.csc_array((coefficients, (rows, columns)), shape=(self.rows, self.columns))
        matrix.eliminate_zeros()
        return matrix

    cost = property(lambda self: _joined(self._cost), doc="(columns,) float64: the objective.")
    lower = property(lambda self: _joined(self._lower), doc="(columns,) float64: lower bounds.")
    upper = property(lambda self: _joined(self._upper), doc="(columns,) float64: upper bounds.")
    integer = property(lambda self: _joined(self._integer).astype(bool), doc="(columns,) bool.")
    row_lower = property(lambda self: _joined(self._row_lower), doc="(rows,) float64.")
    row_upper = property(lambda self: _joined(self._row_upper), doc="(rows,) float64.")

    def column_names(self) -> list[str]:
        """The name of each column, such as R_3_1 for R[3, 1]."""
        return ["_".join(map(str, (name, *at))) for name, mask in self._named for at in np.argwhere(mask)]

    def row_names(self) -> list[str]:
        """The name of each row: its family's name and its index within it."""
        families = self.families.items()
        return [f"{name.replace(' ', '_')}_{i}" for name, rows in families for i in range(rows.stop - rows.start)]

    def value(self, x: np.ndarray, family: np.ndarray) -> np.ndarray:
        """The values of a family in a solution ``x``: the family's shape, zero where there is no variable."""
        return np.where(family == NONE, 0.0, x[family])


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0)


def after(family: np.ndarray, none: int | bool = NONE) -> np.ndarray:
    """The columns shifted one stage on, (T, V): entry t is stage t + 1, `NONE` after the last."""
    return np.vstack([family[1:], np.full((1, family.shape[1]), none)])


def before(family: np.ndarray, none: int | bool = NONE) -> np.ndarray:
    """The columns shifted one stage back, (T, V): entry t is stage t - 1, `NONE` before the first."""
    return np.vstack([np.full((1, family.shape[1]), none), family[:-1]])


def pairs(
    model: Model, name: str, first: np.ndarray, others: Sequence[Term], *, upper: float = 0.0, lower: float = -INF
) -> None:
    """Add a row per variable of a family (T, V): it plus its counterparts in further families, at most ``upper``."""
    at = np.nonzero(first != NONE)
    terms = [(first[at], 1.0), *((family[at], coefficient) for family, coefficient in others)]
    model.constrain(name, terms, lower=lower, upper=upper)
