"""Trainers of other libraries on Fleet. Each module needs an extra, and names it where it is missing. ``import fleet`` loads none."""
