"""Regions of a step that can run in parts, so that only a part of their inner values is there at a time."""
