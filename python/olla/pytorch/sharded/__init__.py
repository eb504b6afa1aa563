"""Steps of many ranks, captured by one process: parameters in shards as FSDP2 has them, or whole as with DDP."""
