"""The published systems to compare with: a module each, with `solve(problem) -> Answer`."""
