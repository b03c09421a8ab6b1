"""Within a hard limit on memory, 5 % above what the plan says, plain PyTorch dies and a step in an arena trains."""

from __future__ import annotations

import re
import sys

import pytest

from benchmarks.hard_limit import MARGIN, PLENTY, limited, plan, told
from checkmate.memory import build

STEPS = 30  # `benchmarks/results/hard_limit.jsonl` has a hundred

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts all of a process's data on Linux only"),
]


@pytest.mark.slow
@pytest.mark.long
def test_what_dies_plainly_within_a_limit_trains_in_an_arena_to_the_same_bits() -> None:
    build.start()
    assert build.wait() is None  # once, and kept: the processes find it
    made = told(plan, 0.6)
    budget, planned = made["budget"], made["planned"]
    assert planned > 200_000_000  # of which a twentieth is more than what else a process takes, now and then
    with_plenty = told(limited, "plain", 0, int(PLENTY * planned), STEPS)
    plain = told(limited, "plain", 0, int(MARGIN * planned), STEPS)
    arena = told(limited, "arena", budget, int(MARGIN * planned), STEPS)
    assert with_plenty["error"] is None
    assert len(set(with_plenty["losses"])) == STEPS
    assert plain["losses"] == []
    wanted = re.search(r"can't allocate memory: you tried to allocate (\d+) bytes", plain["error"])
    assert wanted is not None
    assert int(wanted[1]) > 1_000_000  # a value of the step, not what comes with it
    assert arena["error"] is None
    assert (arena["losses"], arena["digest"]) == (with_plenty["losses"], with_plenty["digest"])
    assert arena["data_at_the_end"] <= arena["limit"]
