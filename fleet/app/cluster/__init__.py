"""The nodes of a run: a Ray cluster of this machine, or one that was there before. Also the queue of runs that wait for room."""
