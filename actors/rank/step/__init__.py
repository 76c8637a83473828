"""The arithmetic of a step: gradients, their sum in a fixed order, and the one change of the state."""
