"""The words that processes speak with each other and leave in the journal, and what a rank does with them. Standard library only."""
