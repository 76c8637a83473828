"""Decisions, one file each: pure objects that take what is known and ``now_s``, and return a ``Decision`` with its reason."""
