"""Traces: faults of a fleet, read from its logs, and the rates and habits that follow from them."""
