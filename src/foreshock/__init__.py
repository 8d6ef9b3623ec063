"""Early warning for loss explosions in low-precision attention."""

__version__ = "0.1.0"
