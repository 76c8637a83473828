"""``fleet plan``: from a fleet, a model and a mapping to throughput, losses and cost. Pure arithmetic over :mod:`fleet.laws`."""
