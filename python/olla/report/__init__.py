"""Output for people while a search or a step runs, and after it."""
