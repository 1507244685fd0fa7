"""The version, for those that the package itself imports."""

__version__ = "0.2.0.dev0"
