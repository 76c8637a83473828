"""Which samples a shard of a step has, and how they are read."""
