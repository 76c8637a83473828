"""The ranks: the script that they execute, the process, the loop, faults in it, and the code that connects the rooms below."""
