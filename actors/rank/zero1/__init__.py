"""Optimizer state that is spread over the ranks, and how it moves to other ranks when a view begins."""
