"""dieplace: partition multi-die accelerators, place memory on a die, and measure what misplacing it costs."""

__version__ = "0.1.0"
