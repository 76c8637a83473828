"""The records of a rank for its agent: where its time went, its output, its position in the run."""
