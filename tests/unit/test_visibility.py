"""Visibility variables against the rules of ROCr (amd_filter_device.cpp) and HIP (rocdevice.cpp), case by case."""

import pytest

from dieplace.backends.amd.visibility import Entry, visible

# Two cards of two partitions, with ids equal on a card (older kernels) and distinct (newer ones).
EQUAL = [Entry("a0", 0xABC0000000000001), Entry("a1", 0xABC0000000000001), Entry("b0", 0xABD2), Entry("b1", 0xABD2)]
DISTINCT = [Entry("a0", 0xA1), Entry("a1", 0xA2), Entry("b0", 0xB1), Entry("b1", 0xB2)]
ALL = ("a0", "a1", "b0", "b1")


def rocr(text, entries=DISTINCT):
    return visible(entries, {"ROCR_VISIBLE_DEVICES": text}).order


def hip(text, entries=DISTINCT):
    return visible(entries, {"HIP_VISIBLE_DEVICES": text}).order


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", ("a0",)),
        ("3,1", ("b1", "a1")),
        ("", ()),  # set but empty hides all
        ("-1", ()),
        ("0,0,1", ("a0",)),  # a repeated token ends the list
        ("0,9,1", ("a0",)),
        ("0,x,1", ("a0",)),
        ("0, 1", ("a0", "a1")),  # tokens are trimmed
        ("0x1", ("a1",)),  # strtol with base 0
        ("010", ()),  # octal 8 is no device here
        ("1,", ("a1",)),
        ("0,1,2,3,x", ALL),  # no more tokens are read than there are devices
        ("GPU-00000000000000b1", ("b0",)),
        ("gpu-00000000000000B1,0", ("b0", "a0")),  # any case
        ("GPU-00000000000000a", ()),  # a prefix of two devices is ambiguous
        ("GPU-", ()),  # too short
        ("GPU-00000000000000b1000", ()),  # longer than a UUID
    ],
)
def test_rocr(text, expected):
    assert rocr(text) == expected


def test_rocr_cannot_reach_a_sibling_of_equal_id_by_uuid():
    assert rocr("GPU-abc0000000000001", EQUAL) == ()
    assert rocr("1", EQUAL) == ("a1",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2,0", ("b0", "a0")),
        ("", ALL),  # empty is unset
        ("0,0,1", ("a0", "a1")),  # a repeated one is ignored
        ("0,9,1", ("a0",)),
        ("-1", ()),
        ("0, 1", ("a0",)),  # a space is part of the token
        ("01", ()),
        ("0x1", ()),
        ("1,", ("a1",)),
        ("0,,1", ("a0",)),
        ("GPU-00000000000000b2,0", ("b1", "a0")),
        ("GPU-00000000000000B2", ()),  # case matters here
        ("GPU-00000000000000a", ("a0",)),  # a part that matches several takes the first
        ("9" * 5000, ()),
    ],
)
def test_hip(text, expected):
    assert hip(text) == expected


def test_hip_takes_the_first_sibling_of_an_equal_id():
    assert hip("GPU-abc0000000000001", EQUAL) == ("a0",)


def test_hip_counts_on_what_rocr_left():
    seen = visible(DISTINCT, {"ROCR_VISIBLE_DEVICES": "3,2", "HIP_VISIBLE_DEVICES": "1"})
    assert seen.rocr_order == ("b1", "b0") and seen.order == ("b0",)
    assert seen.index("b0") == 0 and seen.index("b1") is None


def test_cuda_counts_only_where_hip_is_unset_or_empty():
    assert visible(DISTINCT, {"CUDA_VISIBLE_DEVICES": "1"}).order == ("a1",)
    assert visible(DISTINCT, {"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "1"}).order == ("a1",)
    assert visible(DISTINCT, {"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "1"}).order == ("b0",)


def test_every_variable_that_took_part_is_told():
    notes = visible(DISTINCT, {"ROCR_VISIBLE_DEVICES": "0,1,x", "HIP_VISIBLE_DEVICES": "0"}).notes
    assert notes == (
        "ROCR_VISIBLE_DEVICES='0,1,x' leaves 2 of 4 devices; the list ends at 'x', which is not a number",
        "HIP_VISIBLE_DEVICES='0' leaves 1 of 2 devices",
    )
    assert visible(DISTINCT, {}).notes == ()


def test_a_device_without_an_id_has_no_uuid():
    entries = [Entry("a0", None), Entry("a1", 0)]
    assert rocr("GPU-0000000000000000", entries) == ()
    assert rocr("1", entries) == ("a1",)
