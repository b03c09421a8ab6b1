"""Memory of a step: a meter of PyTorch's allocations, and an arena on the CPU with planned addresses."""

from checkmate.memory.meter import CPU, MemoryUse, Recording, aside, measure_peak, record_allocations

__all__ = ["CPU", "MemoryUse", "Recording", "aside", "measure_peak", "record_allocations"]
