"""What an operator looks at: metrics for Prometheus, and the page of one run."""
