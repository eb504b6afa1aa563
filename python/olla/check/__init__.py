"""Is a plan what it says it is? Types are all that this knows of planners."""
