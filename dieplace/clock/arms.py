"""What the clock needs to know of a placement, and the arms that experiments compare.

An arm of one mode differs from `local` in which bytes lie on the peer die, or in how they are cached; nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dieplace.errors import UsageError
from dieplace.workload import ROLES

_INTERLEAVE = re.compile(r"^interleave-([0-8])/8$")
_ARMS = (
    "local",
    "swapped",
    "interleave-k/8",
    "swapped-experts",
    "swapped-dense",
    "swapped-kv_cache",
    "swapped-sync_flag",
    "local-nc",
)


@dataclass(frozen=True)
class Placement:
    """Where a step's bytes are, as seen by the die that reads them.

    `interleaved` is NPS1: pages hashed over both dies, whatever was asked. `peer_share` is the share (0..1) of each
    role's bytes on the peer die. `stages` limits peer_share to those stages (None: all). `cached_as_remote` are roles
    that are local but mapped NC (`mtype_local=1`). `polling_waves` are further waves that poll each far flag line.
    """

    name: str
    interleaved: bool = False
    peer_share: Mapping[str, float] = field(default_factory=dict)
    stages: tuple[str, ...] | None = None
    cached_as_remote: frozenset[str] = frozenset()
    polling_waves: int = 0

    def __post_init__(self) -> None:
        for role, share in self.peer_share.items():
            if role not in ROLES:
                raise UsageError(f"no role {role!r}", hint=f"one of {', '.join(ROLES)}")
            if not 0.0 <= share <= 1.0:
                raise UsageError(f"the peer share of {role} is {share}", hint="give a share between 0 and 1")

    def share(self, role: str, stage: str) -> float:
        """Share of a role's bytes on the peer die as one stage reads them."""
        if self.stages is not None and stage not in self.stages:
            return 0.0
        return float(self.peer_share.get(role, 0.0))


def arm(name: str) -> Placement:
    """The placement an arm stands for; UsageError lists the names.

    `interleave-k/8` assumes that of every eight consecutive 2 MiB objects k lie on the peer, that HBM and link work in
    parallel, and that the first load after a hand-off is far with probability k/8. `swapped-sync_flag` counts
    distance alone unless polling waves are given.
    """
    if name == "local":
        return Placement(name)
    if name == "swapped":
        return Placement(name, peer_share={"weights": 1.0})
    if name == "swapped-experts":
        return Placement(name, peer_share={"weights": 1.0}, stages=("experts", "mlp"))
    if name == "swapped-dense":
        return Placement(name, peer_share={"weights": 1.0}, stages=("qkv", "o_proj"))
    if name in ("swapped-kv_cache", "swapped-sync_flag"):
        return Placement(name, peer_share={name.removeprefix("swapped-"): 1.0})
    if name == "local-nc":
        return Placement(name, cached_as_remote=frozenset({"weights"}))
    found = _INTERLEAVE.match(name)
    if found:
        return Placement(name, peer_share={"weights": int(found.group(1)) / 8})
    raise UsageError(f"no arm {name!r}", hint=f"one of {', '.join(_ARMS)}", asked=name)
