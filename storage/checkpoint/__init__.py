"""The durable checkpoint: its format, its manifest, its writers, its readers and its export."""
