"""Traces: what struck a fleet, read from the logs that people keep, and the rates and habits that follow from it."""
