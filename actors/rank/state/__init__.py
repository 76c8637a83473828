"""The tracked state of a rank: its transfer, snapshots of it, and its part of checkpoints."""
