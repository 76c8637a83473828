"""A rank among others: its line to its agent, its membership in a view, the process group of that view, and how its death is told."""
