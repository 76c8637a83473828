"""Which samples a shard of a step has, and how ranks read them."""
