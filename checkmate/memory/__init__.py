"""Memory of a step: the meter of what PyTorch allocates, and an arena on the CPU whose addresses are planned."""

from checkmate.memory.meter import CPU, MemoryUse, Recording, aside, measure_peak, record_allocations

__all__ = ["CPU", "MemoryUse", "Recording", "aside", "measure_peak", "record_allocations"]
