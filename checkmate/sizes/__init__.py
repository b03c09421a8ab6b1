"""Batch sizes: the largest that fits a budget, and whether a step fits a device and what would make it fit."""

LARGEST = 2**20  # a size where the search ends, if not told otherwise
TIME_LIMIT = 120.0  # seconds of a search, if not told otherwise
FITS_TIME_LIMIT = 30.0  # seconds to say whether a step fits
