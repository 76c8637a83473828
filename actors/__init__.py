"""All code that runs in Ray's processes."""
