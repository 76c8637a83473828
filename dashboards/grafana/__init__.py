"""Grafana's boards, made from the table of metrics, and how they get there."""
