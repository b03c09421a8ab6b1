"""The largest batch that fits a budget."""

LARGEST = 2**20  # a size where the search ends, if not told otherwise
TIME_LIMIT = 120.0  # seconds of a search, if not told otherwise
