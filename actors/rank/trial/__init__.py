"""A few steps of a training script in one process, without a cluster: for ``fleet doctor``, and before ``fleet run``."""
