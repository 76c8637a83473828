"""Optimizer state that is spread over the ranks, and how it gets to others when a view begins."""
