"""Older names of `torch_rig` and `link_run`; they go once their last user has moved."""

from dieplace.experiments.link_run import as_run, conditions_of
from dieplace.experiments.torch_rig import TorchRig as NvidiaRig
from dieplace.experiments.torch_rig import hash_of, without_serials

__all__ = ["NvidiaRig", "as_run", "conditions_of", "hash_of", "without_serials"]
