"""A shop whose workers are killed all the while: `python -m examples.worker.demo`."""
