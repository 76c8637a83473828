"""The ranks: the script that they execute, the process, the loop, faults in it, and what holds the rooms below together."""
