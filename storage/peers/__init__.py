"""Files in the memories of other nodes."""
