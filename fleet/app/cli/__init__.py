"""The command line: one module for each command, or for a few that belong together. ``main.py`` puts them together."""
