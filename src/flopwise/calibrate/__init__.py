"""Times a device and fits its efficiencies."""

from flopwise.base.processes import let_threads_sleep

let_threads_sleep()
