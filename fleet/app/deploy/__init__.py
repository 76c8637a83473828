"""Files that bring up a cluster with a run on it: from one small spec to texts, and what is wrong in such texts. Nothing is started."""
