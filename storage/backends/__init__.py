"""Where files lie: a directory, S3 or another object store, and why such a store fails."""
