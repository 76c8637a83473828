"""What a rank leaves for its agent: where its time went, what it printed, where it stands."""
