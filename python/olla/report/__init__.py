"""What a person sees while a search or a step runs, and after."""
