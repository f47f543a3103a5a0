"""Calls: handles, functions given to `remat.op`, native regions, and functions of torch that a policy lists."""
