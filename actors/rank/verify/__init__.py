"""Whether what ranks compute is right: comparisons of replicas, shards and sums computed again, and what a loop body may not do."""
