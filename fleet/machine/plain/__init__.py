"""A job that is not Fleet's: what its ranks tell of themselves, and the journal that follows from it. Pure."""
