"""Binding a program to a die: which devices it sees, and on which CPUs and host memory it sits."""

from dieplace.binding.plan import Binding

__all__ = ["Binding"]
