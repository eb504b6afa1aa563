"""Where the ops of a step come from."""
