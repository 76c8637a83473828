"""Trainers that people have, on Fleet. Each module needs an extra, and says so where it is missing. ``import fleet`` loads none."""
