"""Ranks that compute a shard together: the process group that PyTorch's modules see, and a state of which each column has its part."""
