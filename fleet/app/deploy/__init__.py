"""Files that bring up a cluster with a run on it: their texts, made from one small spec, and faults in such texts. Nothing is started."""
