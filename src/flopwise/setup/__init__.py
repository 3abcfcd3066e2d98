"""What is asked: the workload, how it is spread, hardware, efficiencies, the stack, the training."""
