"""The linear model as arrays: what a family of rows means, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate.solvers.linear.model import NONE, Model
from tests.support.pulp_engine import broken


def test_a_family_of_variables_has_the_shape_asked_for_and_its_bounds_broadcast() -> None:
    """A mask makes columns only where it is true."""
    model = Model()
    x = model.variables((2, 3), lower=np.array([[0.0], [1.0]]), upper=5.0, cost=[1.0, 2.0, 3.0], integer=True)
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (model.lower.tolist(), model.upper.tolist()) == ([0, 0, 0, 1, 1, 1], [5] * 6)
    assert model.integer.all()
    x = model.variables(np.array([[True, False], [False, True]]), cost=np.array([[1.0, 2.0], [3.0, 4.0]]))
    assert x.tolist() == [[6, NONE], [NONE, 7]]
    assert model.cost.tolist() == [1, 2, 3, 1, 2, 3, 1, 4]


def test_no_variable_stands_for_zero() -> None:
    model = Model()
    x = model.variables(np.array([True, False, True]))
    model.constrain("pair", [(x[:2], 1.0), (x[1:], -1.0)], upper=0.0)
    assert model.matrix().toarray().tolist() == [[1, 0], [0, -1]]
    assert model.value(np.array([0.25, 0.5]), x).tolist() == [0.25, 0.0, 0.5]


def test_further_axes_are_summed_over_entries_named_twice_add_up_and_zeros_vanish() -> None:
    model = Model()
    x = model.variables((2, 3))
    model.constrain("weighted", [(x, np.array([1.0, 2.0, 3.0]))], upper=[4.0, 5.0])
    assert model.matrix().toarray().tolist() == [[1, 2, 3, 0, 0, 0], [0, 0, 0, 1, 2, 3]]
    assert (model.row_upper.tolist(), model.row_lower.tolist()) == ([4, 5], [-np.inf] * 2)
    model = Model()
    x = model.variables((2,))
    model.constrain("sum", [(x[:1], 1.0), (x[:1], 2.0), (x[1:], 1.0), (x[1:], -1.0)])
    assert (model.matrix().toarray().tolist(), model.matrix().nnz) == ([[3, 0]], 1)


def test_what_is_broken_is_named_with_its_place_and_amount() -> None:
    """An empty model has nothing that is broken."""
    model = Model()
    assert (model.matrix().shape, model.cost.shape, model.row_lower.shape) == ((0, 0), (0,), (0,))
    assert broken(model, np.zeros(0)) == []
    x = model.variables((3,))
    model.constrain("cover", [(x[:2], 1.0), (x[1:], 1.0)], lower=1.0)
    model.constrain("cap", [(x[:1], 2.0)], upper=1.0)
    assert broken(model, np.array([1.0, 0.0, 0.25])) == ["cover[1] by 0.75", "cap[0] by 1"]
    assert broken(model, np.array([0.5, 0.5, 0.5])) == []


def test_columns_and_rows_have_names_for_files_and_a_name_stands_for_one_family() -> None:
    model = Model()
    x = model.variables(np.array([[True, False], [True, True]]), name="R")
    model.variables((1,))
    model.constrain("only one", [(x[1], 1.0)], upper=1.0)
    assert model.column_names() == ["R_0_0", "R_1_0", "R_1_1", "x1_0"]
    assert model.row_names() == ["only_one_0", "only_one_1"]
    with pytest.raises(ValueError, match="named 'only one' already"):
        model.constrain("only one", [(x, 1.0)])


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_dense_and_sparse_rows_equal_plain_loops(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, wide = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    model = Model()
    x = model.variables(rng.random((rows, wide)) < 0.7)
    coefficients = rng.integers(-2, 3, (rows, wide)).astype(float)
    model.constrain("dense", [(x, coefficients)])
    i, j = np.nonzero(np.ones((rows, wide)))
    model.constrain_sparse("sparse", rows, [(i, x[i, j], coefficients[i, j])])
    expected = np.zeros((rows, model.columns))
    for r, c in np.argwhere(x != NONE):
        expected[r, x[r, c]] += coefficients[r, c]
    assert (model.matrix().toarray() == np.vstack([expected, expected])).all()
