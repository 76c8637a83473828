"""A rank among others: its connection to its agent, its membership in a view, that view's process group, and the report of its death."""
