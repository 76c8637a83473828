"""The ground: clock, kernel, files and sockets of this machine. It decides nothing. Standard library only."""
