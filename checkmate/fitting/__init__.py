"""Tell whether a training step fits a device, and what would make it fit: the page of `checkmate.fits`."""

TIME_LIMIT = 30.0  # seconds for everything, if not told otherwise
