"""Trainers of other libraries over a run of Fleet: Fleet replaces their loop and keeps the rest."""
