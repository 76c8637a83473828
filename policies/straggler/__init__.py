"""Slow ranks: their detection, the kind of slowness, and the cheapest remedy."""
