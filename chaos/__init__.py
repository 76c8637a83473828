"""Faults on purpose: catalogue, seeded arrivals, the injector that executes them, and checkers of what followed."""
