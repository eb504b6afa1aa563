"""Which modules of a model are checkpointed in an ordinary loop, and which operators inside them are saved."""
