"""Where in the user's code an op comes from."""

from __future__ import annotations

import re
from dataclasses import dataclass

_WHERE = re.compile(r"(?P<module>[^\s(]+) \((?P<facts>.*)\)")
_LINE = re.compile(r"[^\s,()]+:\d+$")


@dataclass(frozen=True)
class Place:
    """Where in the user's code an op comes from, each part empty where not known."""

    module: str = ""  # path, such as "layer1.0.conv2"
    kind: str = ""  # class of the module, such as "Conv2d"
    line: str = ""  # file and line, such as "resnet.py:31"


def place_of(where: str | None) -> Place:
    """The parts of `Op.where`.

    >>> place_of("layer1.0.conv2 (Conv2d, resnet.py:31)")
    Place(module='layer1.0.conv2', kind='Conv2d', line='resnet.py:31')
    >>> place_of("train.py:7").line, place_of(None).line
    ('train.py:7', '')
    """
    match = _WHERE.fullmatch(where or "")
    module, facts = (match["module"], match["facts"]) if match else ("", where or "")
    *kind, last = facts.split(", ")
    line = last if _LINE.fullmatch(last) else ""
    named = ", ".join(kind if line else [*kind, last])
    if not match and not line:  # a bare path, or words such as "generated code"
        return Place(module="" if " " in facts else facts)
    return Place(module, named, line)
