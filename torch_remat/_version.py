"""The version of this package, which CITATION.cff repeats for a release."""

__version__ = "0.3.0"
