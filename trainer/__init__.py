"""The Trainer, the Task, the loops, the Accelerator and the logging of metrics."""
