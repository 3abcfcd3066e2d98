"""What a device computes: each operator in a plain form and, on a GPU, in a fused one."""
