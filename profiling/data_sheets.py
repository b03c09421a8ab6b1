"""GPUs and CPUs by their data sheets, and the shares of those rates that kernels reach."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from checkmate.devices import CUDA
from checkmate.errors import Unsupported

PCIE = {3: 16e9, 4: 32e9, 5: 64e9}  # bytes per second each way: sixteen lanes of each generation
RESERVE, LEAST_RESERVE = 0.08, 2 * 10**9  # of a device's memory; bytes


@dataclass(frozen=True)
class Device:
    """The rates of a device by its data sheet, and the shares of them that a good kernel reaches.

    Raises:
        ValueError: if a figure is not positive, or there is no rate for float32.

    >>> from checkmate.profiling.roofline import DEVICES, Device
    >>> DEVICES["mine"] = Device("my card", flops={"float32": 10e12, "float16": 40e12}, bandwidth=5e11, latency=4e-6)
    >>> _ = DEVICES.pop("mine")
    """

    name: str
    flops: Mapping[str, float]  # FLOP per second of dense products, by type: "float32", "bfloat16", ..., and "tf32"
    bandwidth: float  # bytes per second, to and from the device's memory
    latency: float  # seconds that each op takes at least
    block_bytes: int = 1  # sizes are rounded up to a multiple of these
    capability: tuple[int, int] | None = None  # compute capability of a GPU of NVIDIA; else it runs as a CPU does
    compute_efficiency: float = 0.7  # of the peak rate: what large matrix products and convolutions reach
    memory_efficiency: float = 0.8  # of the bandwidth: what copies and pointwise kernels reach
    processors: int = 0  # of a GPU, each of which computes a tile of a product at a time; 0: no GPU
    clock: float = 0.0  # cycles per second of the units
    cache_bytes: int = 0  # of the cache that they share
    host: float = 0.0  # seconds that Python and PyTorch take to launch an op, while the device computes
    memory_bytes: int = 0  # 0: not known
    link: float = PCIE[4]  # bytes per second to other devices of its kind, each way
    host_link: float = PCIE[4]  # bytes per second to the memory of its host, each way

    def __post_init__(self) -> None:
        figures = (self.bandwidth, self.block_bytes, self.compute_efficiency, self.memory_efficiency)
        links = self.link, self.host_link
        amounts = (self.latency, self.host, self.processors, self.clock, self.cache_bytes)
        if not all(figure > 0 for figure in (*figures, *links, *self.flops.values())) or min(amounts) < 0:
            raise ValueError(f"The rates, sizes and shares of {self.name!r} must be positive, and its latency not < 0.")
        if self.processors and not self.clock:
            raise ValueError(f"{self.name!r} has processors, and no clock.")
        if "float32" not in self.flops:
            raise ValueError(f"{self.name!r} has no rate for float32.")

    @property
    def room(self) -> int:
        """Bytes for steps that are planned without the device; 0 if not known.

        The others are reserved for what nobody measured then: CUDA's context, workspaces of cuDNN and cuBLAS, gaps.

        >>> DEVICES["h100"].room
        79027398247
        """
        return max(0, self.memory_bytes - max(int(RESERVE * self.memory_bytes), LEAST_RESERVE))

    def seconds(self, flop: float, dtype: str, moved_bytes: float) -> float:
        """Seconds of one op.

        Raises:
            Unsupported: if the device has no rate for this type.

        >>> device = Device("", {"float32": 1e12}, 1e11, 1e-6, compute_efficiency=0.5, memory_efficiency=0.5)
        >>> device.seconds(flop=1e9, dtype="float32", moved_bytes=1e6)
        0.002001
        """
        seconds = moved_bytes / (self.memory_efficiency * self.bandwidth)
        if flop:
            if dtype not in self.flops:
                raise Unsupported(f"{self.name} has no rate for {dtype}, only for {', '.join(self.flops)}.")
            seconds = max(seconds, flop / (self.compute_efficiency * self.flops[dtype]))
        return self.latency + seconds


def _gpu(
    name: str,
    sm: tuple[int, int],
    flops: Mapping[str, float],
    bandwidth: float,
    processors: tuple[int, float],
    cache: float,
    memory: int,
    *,
    pcie: int = 4,
    **others: float,
) -> Device:
    """An NVIDIA card: dense rates, half-precision products summed in float32; GB/s; GHz; MB; GiB.

    What products reach of the rate is without what tiles cost, `checkmate.profiling.roofline`: it fits the products
    of Llama-2-7B that Vidur (Agrawal et al., MLSys 2024) measured on an A100 and an H100. A kernel takes 2 µs at least
    there; 5 µs of the host for each op are what a constant takes more than an op of Python's in NeuSight's tables (Lee
    et al., ASPLOS 2025). `benchmarks.estimates` holds both against steps.
    """
    count, clock = processors
    return Device(
        name,
        flops,
        bandwidth * 1e9,
        latency=2e-6,
        block_bytes=CUDA.block_bytes,
        capability=sm,
        processors=count,
        clock=clock * 1e9,
        cache_bytes=int(cache * 1e6),
        memory_bytes=memory * 2**30,
        host=5e-6,
        **{"compute_efficiency": 0.8, "link": PCIE[pcie], "host_link": PCIE[pcie], **others},
    )


def _teras(
    float64: float, float32: float, tf32: float | None, half: float, bfloat16: float | None = None
) -> dict[str, float]:
    """FLOP/s by type, from TFLOP/s; bfloat16 is as fast as float16 unless given."""
    rates = {"bfloat16": bfloat16 or half, "float64": float64, "float32": float32, "tf32": tf32, "float16": half}
    return {dtype: rate * 1e12 for dtype, rate in rates.items() if rate is not None}


def _geforce(
    model: str,
    sm: tuple[int, int],
    bandwidth: float,
    processors: tuple[int, float],
    cache: float,
    memory: int,
    **more: int,
) -> Device:
    """A GeForce card, whose processors have 128 units each that multiply and add in each cycle."""
    float32 = processors[0] * processors[1] * 128 * 2 / 1000
    flops = _teras(float32 / 64, float32, float32, 2 * float32)
    return _gpu(f"NVIDIA GeForce RTX {model}", sm, flops, bandwidth, processors, cache, memory, **more)


DEVICES: dict[str, Device] = {
    # NVIDIA H100 Tensor Core GPU data sheet (2023), SXM; half of the figures that it gives with sparsity. Processors,
    # clock and cache of this and the next from the NVIDIA H100 Tensor Core GPU architecture whitepaper (2022). Its
    # links and those of others are NVLinks, half of what data sheets give for both ways; PCIe is 4 where none is said.
    "h100": _gpu(
        "NVIDIA H100 SXM", (9, 0), _teras(67, 67, 494.7, 989.4), 3350, (132, 1.98), 50, 80, link=450e9, pcie=5
    ),
    # NVIDIA H200 Tensor Core GPU data sheet (2024), SXM: the H100's processor with faster memory.
    "h200": _gpu(
        "NVIDIA H200 SXM", (9, 0), _teras(67, 67, 494.7, 989.4), 4800, (132, 1.98), 50, 141, link=450e9, pcie=5
    ),
    # NVIDIA A100 Tensor Core GPU data sheet (2021), 80 GB SXM; NVIDIA A100 architecture whitepaper (2020).
    "a100": _gpu("NVIDIA A100 SXM 80GB", (8, 0), _teras(19.5, 19.5, 156, 312), 2039, (108, 1.41), 40, 80, link=300e9),
    # The same processor with the memory of the first one (2020), of half the size and three quarters of the rate, as
    # public tables of cards give it: this one's data sheet was not read.
    "a100-40gb": _gpu(
        "NVIDIA A100 SXM 40GB", (8, 0), _teras(19.5, 19.5, 156, 312), 1555, (108, 1.41), 40, 40, link=300e9
    ),
    # NVIDIA V100 data sheet (2020), SXM2, and NVIDIA Tesla V100 architecture whitepaper (2017). Its tensor cores take
    # float16 only: bfloat16 is computed as float32, and there is no tf32.
    "v100": _gpu(
        "NVIDIA V100 SXM2", (7, 0), _teras(7.8, 15.7, None, 125, 15.7), 900, (80, 1.53), 6, 32, link=150e9, pcie=3
    ),
    # As public tables of cards give it, which name the data sheet (2019) that was not read here; float64 is 1/32 of
    # float32. As on a V100 bfloat16 is computed as float32, and there is no tf32.
    "t4": _gpu("NVIDIA T4", (7, 5), _teras(0.254, 8.1, None, 65, 8.1), 320, (40, 1.59), 4, 16, pcie=3),
    # NVIDIA L4 data sheet (2023); half of the figures that it gives with sparsity; float64 is 1/64 of float32. Its
    # processors, clock and cache are those of the AD104 of the Ada whitepaper, as far as the L4 has them.
    "l4": _gpu("NVIDIA L4", (8, 9), _teras(0.473, 30.3, 60, 121), 300, (58, 2.04), 48, 24),
    # As public tables of cards give it, which name the data sheet (2023) that was not read here; half of the figures
    # with sparsity; float64 is 1/64 of float32. Its cache is half of the AD102's.
    "l40s": _gpu("NVIDIA L40S", (8, 9), _teras(1.43, 91.6, 183, 362), 864, (142, 2.52), 48, 48),
    # As public tables of cards give it; the whitepaper (2025) was not read. tf32 and half are 1 and 2 times float32,
    # as for its siblings, which the published figures with sparsity agree with; float64 is 1/64 of float32.
    "rtx5090": _gpu(
        "NVIDIA GeForce RTX 5090", (12, 0), _teras(1.64, 104.8, 104.8, 209.5), 1792, (170, 2.407), 96, 32, pcie=5
    ),
    # NVIDIA Ada GPU architecture whitepaper (2022), appendix A; float64 is 1/64 of float32.
    "rtx4090": _gpu("NVIDIA GeForce RTX 4090", (8, 9), _teras(1.29, 82.6, 82.6, 165.2), 1008, (128, 2.52), 72, 24),
    # NVIDIA Ampere GA102 GPU architecture whitepaper (2021), appendix A; float64 is 1/64 of float32. GeForce cards run
    # at more than the clock of the data sheet while they are cool, and GDDR6X has larger bursts for its rate: .9 of
    # both fits ResNet-50 and ViT-B/16 as measured on one.
    "rtx3090": _gpu(
        "NVIDIA GeForce RTX 3090",
        (8, 6),
        _teras(0.556, 35.6, 35.6, 71.2),
        936,
        (82, 1.695),
        6,
        24,
        compute_efficiency=0.9,
        memory_efficiency=0.9,
    ),
    # Specifications of the 12 GB card; tf32 and half are 1 and 2 times float32 as for its siblings in the NVIDIA Ampere
    # GA102 GPU architecture whitepaper (2021); float64 is 1/64.
    "rtx3060": _gpu("NVIDIA GeForce RTX 3060", (8, 6), _teras(0.199, 12.7, 12.7, 25.5), 360, (28, 1.777), 3, 12),
    # As public tables of cards give them; tf32, half and float64 as for the siblings above. The 4060 has eight lanes.
    "rtx3070": _geforce("3070", (8, 6), 448, (46, 1.725), 4, 8),
    "rtx3080": _geforce("3080", (8, 6), 760, (68, 1.71), 5, 10),
    "rtx4060": _geforce("4060", (8, 9), 272, (24, 2.46), 24, 8, pcie=3),
    "rtx4070": _geforce("4070", (8, 9), 504, (46, 2.475), 36, 12),
    "rtx4080": _geforce("4080", (8, 9), 716.8, (76, 2.505), 64, 16),
    "rtx5070": _geforce("5070", (12, 0), 672, (48, 2.512), 48, 12, pcie=5),
    "rtx5080": _geforce("5080", (12, 0), 960, (84, 2.617), 64, 16, pcie=5),
    # No one product: 8 cores at 3 GHz with two 8-wide fused multiply-adds each cycle, two channels of DDR5-4800. It has
    # no units for half precision: such a product takes as long as in float32.
    "laptop": Device(
        "laptop CPU",
        {"float64": 0.384e12, "float32": 0.768e12, "bfloat16": 0.768e12, "float16": 0.768e12},
        bandwidth=76.8e9,
        latency=2e-6,
        link=1e9,  # processes that speak by gloo
    ),
}


def device_named(name: str) -> Device:
    """The device of a name, in letters of any case and with or without spaces, hyphens and "rtx".

    Raises:
        ValueError: if there is none, with the names that are near, and what to write for another card.

    >>> device_named("RTX 4090").name, device_named("4090").name
    ('NVIDIA GeForce RTX 4090', 'NVIDIA GeForce RTX 4090')
    """
    plain = {re.sub(r"[^a-z0-9]", "", device_name.lower()): device_name for device_name in DEVICES}
    key = re.sub(r"[^a-z0-9]|nvidia|geforce", "", str(name).lower())
    key = f"rtx{key}" if key.isdecimal() else key
    if name in DEVICES or key in plain:
        return DEVICES[name if name in DEVICES else plain[key]]
    near = [plain[match] for match in get_close_matches(key, plain, 2)]
    meant = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise ValueError(
        f"There is no device {name!r}. {meant}There are {', '.join(DEVICES)}. For another card name one like it, and "
        "as budget 2 GB less than the other one has: budget='8 GB', on the command line --device rtx4090 --budget 8GB."
    )
