"""What kinds of device differ in; an accelerator that is neither the CPU nor CUDA: `test_private_use.py`."""

from __future__ import annotations

import pytest
import torch

from checkmate.devices import is_here, is_known, kind_of, kinds

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda", 0), torch.device("meta")


def test_cuda_is_known_where_there_is_none() -> None:
    """It can be planned for from a machine without one; others cannot."""
    assert is_known(CPU)
    assert is_known(CUDA)
    assert {"cpu", "cuda"} <= {*kinds()}
    assert is_here(CPU)
    assert is_here(CUDA) == torch.cuda.is_available()
    assert kind_of(CUDA).block_bytes == 512
    assert not kind_of(CPU).may_waver
    assert not is_known(META)
    assert not is_known(torch.device("mps"))


def test_an_allocator_that_does_not_count_what_is_asked_for_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one might that counts its blocks alone; here with the CPU in its place."""
    from checkmate import devices

    monkeypatch.setattr(devices, "_KINDS", {})
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: CPU)
    for counts, known in (({"requested_bytes.all.current": 512}, True), ({"allocated_bytes.all.current": 512}, False)):
        devices._counts_requests.cache_clear()
        monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device, counts=counts: counts)
        assert is_known(CPU) == known
    devices._counts_requests.cache_clear()
