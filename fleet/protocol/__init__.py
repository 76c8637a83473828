"""Messages between processes, records of the journal, and a rank's half of the protocol. Standard library only."""
