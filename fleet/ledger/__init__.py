"""The ledger: a fold of a run's journal into rank-seconds by category, and the figures that follow from it."""
