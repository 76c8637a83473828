"""The table of metrics, and the rules and alerts that follow from it."""
