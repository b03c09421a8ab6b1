"""A plan as one HTML page."""
