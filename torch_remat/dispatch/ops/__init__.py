"""Policies by op: the log of a region's ops in forward, what of it replay needs, and replay from it."""
