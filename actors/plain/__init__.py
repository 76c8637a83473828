"""A job that is not Fleet's: its launcher, its ranks, and who listens to them."""
