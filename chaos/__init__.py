"""Faults on purpose: the catalogue, seeded arrivals, the injector, and what carries each kind out."""
