"""Settings of a run: fields with defaults and meanings."""
