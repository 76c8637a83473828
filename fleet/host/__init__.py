"""The ground: clock, kernel, files and sockets of this machine. Nothing is decided here. Standard library only."""
