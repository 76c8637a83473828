"""Closed forms: pure functions with units in their names and the source of each formula. ``docs`` compares them with measurements."""
