"""Custom autograd Functions in the log."""
