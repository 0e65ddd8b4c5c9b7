"""A Triton server in front of one executor, started, probed, supervised and stopped as one."""
