"""The version, for those that the package itself imports."""

__version__ = "0.1.0"
