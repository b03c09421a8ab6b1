"""Whether a training step fits a device, and what would make it fit: the page that `checkmate.fits` answers with."""

TIME_LIMIT = 30.0  # seconds for everything, if not told otherwise
