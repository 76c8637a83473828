"""``fleet plan``: a fleet, a model and a mapping in, what it will do and what it will lose out. Pure arithmetic over :mod:`fleet.laws`."""
