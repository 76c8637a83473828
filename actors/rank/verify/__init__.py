"""Checks that ranks compute correctly: comparisons of replicas, shards and sums computed again, and changes that a loop body may not
make."""
