"""Faults on purpose: the catalogue, seeded arrivals, the injector, and the performers of each kind of fault."""
