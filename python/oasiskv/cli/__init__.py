"""The command `oasiskv`."""
