"""Faults on purpose: catalogue, seeded arrivals, the conductor that executes them, and checkers of what followed."""
