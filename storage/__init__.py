"""Durable checkpoints. A checkpoint exists once its manifest does."""
