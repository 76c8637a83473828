"""What a rank tracks: its transfer, snapshots of it, and its part of checkpoints."""
