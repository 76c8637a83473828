"""Decisions, one file each: pure objects that take the known facts and ``now_s``, and return a ``Decision`` with its reason."""
