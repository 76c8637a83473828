"""Where the nodes of a run come from: a Ray cluster of this machine, or one that was there before; and runs that wait for room there."""
