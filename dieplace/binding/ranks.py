"""Which of several processes this one is, from what torchrun, Slurm or an MPI launcher put into the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dieplace.errors import Unsupported, UsageError

# torchrun; Slurm; Open MPI; MVAPICH; MPICH and Intel MPI (Hydra); Cray PALS; Flux
RANK_VARIABLES = (
    "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID",
    "PALS_LOCAL_RANKID", "FLUX_TASK_LOCAL_ID",
)  # fmt: skip


def local_rank(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """This process's number on its node and the variable that says so; None where no launcher set one.

    UsageError where a value is not a number. Where several are set, torchrun's wins (it may itself run under Slurm, one
    task a node), then the order of RANK_VARIABLES.
    """
    for name in RANK_VARIABLES:
        text = environ.get(name, "").strip()
        if not text:
            continue
        if not text.isascii() or not text.isdigit() or len(text) > 6:
            raise UsageError(
                f"the variable {name} is {text!r}, which is no rank", hint="a launcher sets it to 0, 1, ..."
            )
        return int(text), name
    return None


def require_rank(environ: Mapping[str, str], count: int) -> int:
    """The local rank, which must be one of `count` devices."""
    found = local_rank(environ)
    if found is None:
        raise UsageError(
            "no launcher says which rank this process is",
            hint=f"start it under torchrun, srun or mpirun, or set one of {', '.join(RANK_VARIABLES)}",
        )
    rank, name = found
    if rank >= count:
        raise Unsupported(
            f"{name}={rank} asks for device number {rank}, and there are {count}",
            hint="start fewer processes a node, or partition the cards into more devices",
            rank=rank,
            devices=count,
        )
    return rank


@dataclass(frozen=True)
class Launched:
    """What torchrun says to a process it started: its place among all, its place on its node, and where its store is.

    `node` counts torchrun's agents, one a host. `address` and `port` are of the store through which ranks talk:
    torchrun serves it and it outlives every rank, or, with some rendezvous back ends, rank 0 has to (`served` is
    False). `attempt` counts restarts.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    address: str
    port: int
    run_id: str
    attempt: int
    served: bool = True


_TORCHRUN = {
    "rank": "RANK", "world_size": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "local_world_size": "LOCAL_WORLD_SIZE",
    "node": "GROUP_RANK", "port": "MASTER_PORT", "attempt": "TORCHELASTIC_RESTART_COUNT",
}  # fmt: skip


def torchrun(environ: Mapping[str, str]) -> Launched | None:
    """What torchrun set (docs.pytorch.org, `torchrun`, environment variables); None where it did not start this.

    RANK and WORLD_SIZE alone are no sign of it: `dieplace exec --per-device` and other launchers set them too, and
    serve no store. UsageError where a variable that torchrun sets is gone or is no number.
    """
    run_id = environ.get("TORCHELASTIC_RUN_ID", "").strip()
    if not run_id:
        return None
    numbers = {key: _number(environ, name) for key, name in _TORCHRUN.items()}
    address = environ.get("MASTER_ADDR", "").strip()
    if not address:
        raise _not_torchruns("MASTER_ADDR", "")
    if numbers["rank"] >= numbers["world_size"] or numbers["local_rank"] >= numbers["local_world_size"]:
        raise _not_torchruns("RANK", f"{numbers['rank']} of {numbers['world_size']}")
    if not 0 < numbers["port"] < 1 << 16:
        raise _not_torchruns("MASTER_PORT", str(numbers["port"]))
    served = environ.get("TORCHELASTIC_USE_AGENT_STORE", "True") == "True"
    return Launched(address=address, run_id=run_id, served=served, **numbers)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "").strip()
    if not (text.isascii() and text.isdigit() and len(text) < 7):
        raise _not_torchruns(name, text)
    return int(text)


def _not_torchruns(name: str, text: str) -> UsageError:
    return UsageError(
        f"TORCHELASTIC_RUN_ID says that torchrun started this process, and {name} is {text!r}",
        hint="start it with torchrun, or unset TORCHELASTIC_RUN_ID",
    )
