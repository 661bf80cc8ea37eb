"""`dieplace partition export --for`: the node for Slurm, Kubernetes and systemd."""

from __future__ import annotations

import os
import shutil
import sys

import click

from dieplace.cli import render
from dieplace.cli.options import machine
from dieplace.cli.table import Document


def export_for(ctx: click.Context, target: str, profile: str) -> None:
    """Print what `target` reads, made from the node as it is now."""
    from dieplace import exporters
    from dieplace.binding.host import read_nodes, siblings_of
    from dieplace.sysfs import Sysfs

    found = machine(ctx, backend="amd", links=False)
    if target == "slurm":
        sysfs = getattr(found.session, "sysfs", None) or Sysfs("/")
        nodes, _ = read_nodes(sysfs)
        every = tuple(sorted(cpu for node in nodes for cpu in node.cpus))
        cores = exporters.slurm_cores(siblings_of(sysfs, every), {node.number: node.cpus for node in nodes})
        text = exporters.slurm(found, cores=cores)
    elif target == "kubernetes":
        text = exporters.kubernetes(found, profile=profile)
    else:
        text = exporters.systemd(_own_command(), profile=profile)
    payload = {"for": target, "name": profile, "text": text}
    render.answer(ctx, "partition-export/1", payload, source=found.source, table=lambda: [Document(text.rstrip("\n"))])


def _own_command() -> str:
    """This command's own path, as a unit will call it."""
    return shutil.which("dieplace") or os.path.abspath(sys.argv[0])
