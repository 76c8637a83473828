"""A plain job, whose script runs without Fleet: messages of its ranks, and the journal that follows from them. Pure."""
