"""The few kernels that the audit and the clock need: streaming read, pointer chase, two-party ping-pong.

Importing this package imports no FlyDSL; `OPS` says where each probe is, as the registry of the decode kernels does.
"""

from __future__ import annotations

OPS: dict[str, str] = {
    "probe_stream": "dieplace.probes.stream:probe_stream",
    "probe_chase": "dieplace.probes.chase:probe_chase",
    "probe_ping_pong": "dieplace.probes.ping_pong:probe_ping_pong",
}
