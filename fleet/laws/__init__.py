"""Closed forms: pure functions with units in their names and the source of each formula. One module a topic; ``docs/laws.md`` lists all.

An array may take the place of a float, and gives an array. Impossible inputs raise ConfigError with field, value, reason and the nearest
valid value; a result that is not finite raises too.
"""
