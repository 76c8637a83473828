"""What a run can be told: fields with defaults and meanings."""
