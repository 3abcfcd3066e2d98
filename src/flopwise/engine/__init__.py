"""Plan → measurement: kernels, blocks, the streaming executor, the distributed executor, data, checkpoints."""

from flopwise.base.processes import let_threads_sleep

let_threads_sleep()
