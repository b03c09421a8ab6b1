"""How fast the links to a second memory are, measured once and kept on disk: plans of the next start are the same then.

One small JSON file for each place, that is the machine, its device and the folder, beside the costs of ops
(`checkmate.core.files`). Whoever measures at the same time takes what the first has written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from checkmate.core import files
from checkmate.errors import InvalidProblem
from checkmate.host.links import BLOCKS, Links, measure
from checkmate.host.opening import open_store
from checkmate.host.slots import rounded

log = logging.getLogger("checkmate.host")

FORMAT, VERSION = "checkmate-links", 1
_measured: dict[str, Links] = {}  # in this process, by place


def known_links(where: str, device: torch.device, *, cache: bool = True) -> Links:
    """The links to a second memory, as `checkmate.host.open_store` names it.

    Args:
        where, device: as there.
        cache: take what is on disk, and keep there what is measured.

    Raises:
        HostError: if it cannot be had, or a copy fails.

    >>> known_links("file:", torch.device("cpu")) == known_links("file:", torch.device("cpu"))
    True
    """
    place = _place(where, device)
    path = files.folder() / "links" / f"{hashlib.sha256(place.encode()).hexdigest()[:16]}.json"
    if place not in _measured:
        links = _read(path, place) if cache else None
        if links is None:
            links = _measure(where, device)
            links = _first_of(path, place, links) if cache else links
        _measured[place] = links
    return _measured[place]


def _place(where: str, device: torch.device) -> str:
    kind, colon, folder = where.partition(":")
    if colon:
        where = f"{kind}:{os.path.realpath(folder or tempfile.gettempdir())}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return f"{where} beside {device.type} {name} of {platform.node()}"


def _measure(where: str, device: torch.device) -> Links:
    store = open_store(where, 2 * rounded(max(BLOCKS)), device)
    try:
        links = measure(store, device)
    finally:
        store.close()
    log.info("%s: %.3g GB/s there, %.3g back", where, links.send / 1e9, links.fetch / 1e9)
    return links


def _read(path: Path, place: str) -> Links | None:
    """What is kept of a place; None, with a warning where there is reason for one, if there is nothing."""
    try:
        document = files.read_json(path, format=FORMAT, version=VERSION, what="file of links")
        links = _links(document["links"])
    except FileNotFoundError:
        return None
    except (InvalidProblem, OSError, KeyError, TypeError, ValueError) as error:
        log.warning("The links to a second memory are measured anew: %s", error)
        return None
    return links if document.get("place") == place else None


def _links(kept: dict[str, Any]) -> Links:
    links = Links(**kept)
    for name in ("send", "fetch"):
        rate = getattr(links, name)
        if not isinstance(rate, float) or not 0 < rate < math.inf:
            raise ValueError(f"{name} is {rate!r:.100}")
    if not isinstance(links.latency, float) or not 0 <= links.latency < math.inf or type(links.shared) is not bool:
        raise ValueError(f"{json.dumps(kept):.200} says no links")
    return links


def _first_of(path: Path, place: str, links: Links) -> Links:
    """What the first process has kept that measured; a warning says if nothing can be kept."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.locked(path):
            known = _read(path, place)
            if known is None:
                document = {"format": FORMAT, "version": VERSION, "place": place, "links": asdict(links)}
                files.write_json(path, document, indent=0)
    except OSError as error:
        log.warning("What was measured of a second memory is not kept for the next time: %s", error)
        return links
    return known or links
