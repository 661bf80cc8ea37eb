"""What a run file must hold to be shown: checked once when it is read, so that no table trips over a damaged one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dieplace.errors import UsageError
from dieplace.experiments import live_tables
from dieplace.experiments.scale_out_merge import OWN_CONDITIONS
from dieplace.run import Point, Run

QUANTITIES = ("token_us", "all_local_us", "penalty", "distance_us", "link_us", "cache_type_us", "wait_us")
MOST = 1e18  # beyond it a file is damaged: no time in us and no size in bytes is as large
_STAGE_NUMBERS = (
    *("repeats", "stream_us", "handoff_us", "distance_us", "link_us", "cache_type_us", "wait_us", "total_us"),
)
_SET_NUMBERS = ("handoff_us", "packed_steps", "local_gain", "link_tb_per_s", "release_wait_us")


def check_shape(run: Run, where: str) -> Run:
    """The run itself; UsageError that names the first part that is missing or of another kind."""
    try:
        _check(run)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise UsageError(f"{where} is no complete {run.experiment} run: {_told(error)}") from error
    return run


def _told(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _check(run: Run) -> None:
    if run.experiment == "scale-out":  # what its tables read is read by making them
        _check_live(run)
        run.to_json()
        for rank in _list(run.facts["ranks"], "facts.ranks"):
            for key in OWN_CONDITIONS:
                if rank.get(key) is not None:
                    _number(rank[key], f"{key} of a rank")
        live_tables.tables((run,))
        live_tables.sentences((run,))
        return
    if live_tables.is_live((run,)):
        _check_live(run)
        return
    work = run.workload
    for key in ("name", "model", "precision"):
        _want(work[key], str, f"workload.{key}")
    _number(work["context_tokens"], "workload.context_tokens")
    for role, nbytes in _mapping(work["bytes_per_token_by_role"], "workload.bytes_per_token_by_role").items():
        _number(nbytes, f"bytes of {role}")
    dies_of = {}
    for device in _list(run.machine["devices"], "machine.devices"):
        _want(device["id"], str, "a device id")
        dies = _list(device["dies"], "a device's dies")
        if not dies or not all(isinstance(die, int) for die in dies):
            raise ValueError(f"device {device['id']} has no dies")
        dies_of[device["id"]] = dies
    for domain in _list(run.machine["domains"], "machine.domains"):
        _list(domain["dies"], "a domain's dies")
        if domain["card"] is not None:
            _number(domain["total_bytes"], "a domain's total_bytes")
    for one in _list(run.facts.get("parameter_sets", []), "facts.parameter_sets"):
        for key in _SET_NUMBERS:
            _number(one[key], f"parameter {key}")
        for key in ("name", "label", "fitted_to"):
            _want(one[key], str, f"parameter set's {key}")
    _mapping(run.facts.get("left_out", {}), "facts.left_out")
    if not run.points:
        raise ValueError("it has no points")
    for point in run.points:
        _check_point(point, dies_of)


def _check_live(run: Run) -> None:
    """Measured runs, of experiments that are not known here too: what tables and report read of them."""
    _want(run.workload["name"], str, "workload.name")
    for key in ("context_tokens", "bytes_per_layer"):
        if run.workload.get(key) is not None:
            _number(run.workload[key], f"workload.{key}")
    for name, value in _mapping(run.facts.get("prediction", {}), "facts.prediction").items():
        if name.endswith("_gb_per_s"):
            _number(value, f"facts.prediction.{name}")
    if run.facts.get("clock_share") is not None:
        _number(run.facts["clock_share"], "facts.clock_share")
    for group in ("devices", "domains", "cards"):
        for one in _list(run.machine.get(group, []), f"machine.{group}"):
            _want(one["id"], str, f"an id of machine.{group}")
            for key in ("domain", "card"):
                _want(one.get(key) or "", str, f"the {key} of {one['id']}")
            _whole(one.get("runtime_index") or 0, f"the runtime index of {one['id']}")
    visible = run.facts.get("visible")
    if visible is not None and not all(isinstance(name, str) for name in _list(visible, "facts.visible")):
        raise TypeError("facts.visible names what is no text")
    if not run.points:
        raise ValueError("it has no points")
    for point in run.points:
        _check_live_point(run, point)


def _check_live_point(run: Run, point: Point) -> None:
    _want(point.arm, str, "an arm")
    _numbers_of(point)
    if not all(isinstance(note, str) for note in point.notes):
        raise TypeError("a point's note is no text")
    _mapping(point.factors, "a point's factors")
    if run.experiment == "link":
        for key in ("what", "reader", "directions", "cache"):
            _want(point.factors[key], str, f"a point's {key}")
        _whole(point.factors["working_set_bytes"], "a working set")
    for key in ("moved_bytes_per_layer", "bytes_read", "bytes_read_far"):
        if point.factors.get(key) is not None:
            _number(point.factors[key], key)
    for stage in point.stages:
        _want(stage["stage"], str, "a stage's name")
        if stage.get("us") is not None:
            _number(stage["us"], "us of a stage")
    for key in ("evidence", "moved_evidence"):
        _want((point.residency_before or {}).get(key) or "", str, key)
    for homes in _mapping((point.residency_before or {}).get("bytes_by_role_and_domain", {}), "homes").values():
        for nbytes in _mapping(homes, "bytes of a role").values():
            _number(nbytes, "bytes in a domain")


def _numbers_of(point: Point) -> None:
    for name, quantity in point.quantities.items():
        for text in (quantity.method, quantity.unit):
            _want(text, str, f"method or unit of {name}")
        _want(quantity.why or "", str, f"why of {name}")
        for value in quantity.by_set.values():
            _number(value, f"{name} of {point.arm} in a parameter set")
        for number in (quantity.value, quantity.low, quantity.high, *quantity.samples):
            if number is not None:
                _number(number, f"{name} of {point.arm}")


def _whole(value: Any, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} is no whole number")


def _check_point(point: Point, dies_of: Mapping[str, Any]) -> None:
    _want(point.arm, str, "an arm")
    _mapping(point.factors, "a point's factors")
    _number(point.factors.get("context_tokens", 0), "context_tokens")
    for role, nbytes in _mapping(point.factors.get("bytes_per_token_by_role", {}), "bytes_per_token_by_role").items():
        _number(nbytes, f"bytes of {role}")
    for name in QUANTITIES:
        if name not in point.quantities:
            raise ValueError(f"arm {point.arm} has no {name}")
    _numbers_of(point)
    for stage in point.stages:
        _want(stage["stage"], str, "a stage's name")
        for key in _STAGE_NUMBERS:
            _number(stage[key], f"stage {key}")
        if not isinstance(stage["repeats"], int):
            raise TypeError("a stage's repeats are no whole number")
    if point.residency_before is None:
        return
    for devices in _mapping(point.residency_before["bytes_by_role_device_die"], "bytes_by_role_device_die").values():
        for device, dies in _mapping(devices, "bytes of a role").items():
            if device not in dies_of:
                raise ValueError(f"bytes are told of device {device}, which the machine does not have")
            for die, nbytes in _mapping(dies, "bytes of a device").items():
                int(die)
                _number(nbytes, "bytes of a die")


def _want(value: Any, kind: type, what: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{what} is {type(value).__name__}, not {kind.__name__}")


def _number(value: Any, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > MOST:
        raise TypeError(f"{what} is no number")


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    _want(value, Mapping, what)
    found: Mapping[str, Any] = value
    return found


def _list(value: Any, what: str) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{what} is no list")
    return value
