"""Trainers that people have, over a run of Fleet: their loop is replaced, and all else of them is kept."""
