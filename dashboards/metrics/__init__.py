"""The table of metrics, the rules and alerts that follow from it, and a Prometheus that asks for them."""
