"""Origin of the ops of a step."""
