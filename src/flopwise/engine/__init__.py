"""Plan → measurement: kernels, blocks, the streaming executor, the distributed executor, data, checkpoints."""
