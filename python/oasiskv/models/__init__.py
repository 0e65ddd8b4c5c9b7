"""Model layers; attention and its cache belong to the caller."""
