"""Who is slow, in what, and what is the cheapest to do about it."""
