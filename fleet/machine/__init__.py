"""The decision core: events in, instructions out. Start reading at ``core.py``; ``docs/protocol.md`` names the files in order."""
