"""Models that PyTorch's ``fully_shard`` has cut: each rank keeps chunks of the parameters, and gathers a unit to compute it."""
