"""Storages at home in pinned memory, and the tensors without memory that stand for theirs on a device."""

from __future__ import annotations

import gc

import pytest
import torch

from checkmate.host import HOMES, home_of, is_stand_in
from checkmate.host.homes import within
from checkmate.host.pinned import Pinned, pin_storage
from tests.support.bits import assert_same_bits

pytestmark = pytest.mark.cuda
DEVICE = torch.device("cuda", 0)


def test_a_storage_is_at_home_for_as_long_as_it_lives() -> None:
    gc.collect()
    before = {*HOMES}
    storage = pin_storage(4 * 12_345, DEVICE)
    tensor = within(storage, torch.empty(12_345)).fill_(3.0)
    home = home_of(tensor)
    assert isinstance(home, Pinned)
    assert (home.nbytes, home.device, home.place) == (4 * 12_345, DEVICE, DEVICE)
    assert_same_bits(home.memory.view(torch.float32), tensor)
    beside = [home_of(within(one, torch.empty(2))) for one in home.beside([8, 8])]
    assert [(one.nbytes, one.place) for one in beside if one] == [(8, DEVICE)] * 2
    (stand_in,) = home.stand_ins([tensor])
    del storage, tensor, home, beside
    gc.collect()
    assert {*HOMES} == before
    assert not is_stand_in(stand_in)


def test_stand_ins_take_no_memory_and_are_the_same_from_call_to_call() -> None:
    flat = within(pin_storage(4 * 600, DEVICE), torch.empty(600))
    tensors = [flat[:300].view(10, 30).t(), flat[300:]]
    home = home_of(flat)
    assert isinstance(home, Pinned)
    held = torch.cuda.memory_allocated()
    stand_ins = [*home.stand_ins(tensors)]
    assert torch.cuda.memory_allocated() == held
    assert [(t.shape, t.stride(), t.storage_offset(), t.device) for t in stand_ins] == [
        (t.shape, t.stride(), t.storage_offset(), DEVICE) for t in tensors
    ]
    assert all(map(is_stand_in, stand_ins))
    assert not any(map(is_stand_in, (*tensors, torch.empty(3, device=DEVICE), torch.empty(3, device="meta"))))
    assert {home_of(t) for t in stand_ins} == {home}
    assert all(a is b for a, b in zip(stand_ins, home.stand_ins(tensors), strict=True))
    # Of other tensors in the storage there are others.
    (whole,) = home.stand_ins([flat])
    assert home_of(whole) is home
    assert not is_stand_in(stand_ins[0])
