"""Which of several processes this one is, from what torchrun, Slurm or an MPI launcher put into the environment."""

from __future__ import annotations

from collections.abc import Mapping

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
