"""What a durable checkpoint is: its format, its manifest, how it is written, read back and exported."""
