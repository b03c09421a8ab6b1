"""Tests that older versions of PyTorch cannot pass."""

from __future__ import annotations

import pytest
import torch


def needs(version: str, reason: str) -> pytest.MarkDecorator:
    """Skip a test, or a case of one, before a version of PyTorch: older ones refuse in words, or do otherwise rightly.

    Args:
        version: such as "2.13".
        reason: what older ones do instead.
    """
    running, least = (tuple(map(int, v.split(".")[:2])) for v in (torch.__version__, version))
    return pytest.mark.skipif(running < least, reason=f"before PyTorch {version} {reason}")
