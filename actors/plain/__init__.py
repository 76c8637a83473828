"""A job without Fleet: its launcher, its ranks, and the process that listens to them."""
