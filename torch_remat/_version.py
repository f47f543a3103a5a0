"""The version of this package, and the only place that states it."""

__version__ = "0.3.0.dev0"
