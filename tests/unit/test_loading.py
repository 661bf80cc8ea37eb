"""safetensors files written by the safetensors library or byte by byte, read into tensors that exist already."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from dieplace.errors import UsageError
from dieplace.loading import Target, load_safetensors
from dieplace.tensorfile import TensorFile


def write(path: Path, entries: dict[str, tuple[str, list[int], bytes]]) -> Path:
    """A file by the published format, without any library: dtype word, shape, data."""
    header, data = {}, b""
    for name, (word, shape, content) in entries.items():
        header[name] = {"dtype": word, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_values_of_the_library_arrive_in_the_same_storage(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).to(torch.bfloat16), "c": torch.arange(4, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    model = {name: torch.zeros_like(t) for name, t in tensors.items()}
    pointers = {name: t.data_ptr() for name, t in model.items()}
    report = load_safetensors(model, tmp_path / "m.safetensors")
    assert all(torch.equal(model[n], tensors[n]) for n in tensors)
    assert {n: t.data_ptr() for n, t in model.items()} == pointers
    assert (report.tensors, report.nbytes) == (3, 60 + 14 + 4)


def test_a_module_with_tied_weights_needs_one_of_the_two_names(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(4, 3)
            self.head = torch.nn.Linear(3, 4, bias=False)
            self.head.weight = self.embed.weight

    wanted = torch.randn(4, 3)
    save_file({"embed.weight": wanted}, tmp_path / "m.safetensors")
    model = Tied()
    load_safetensors(model, tmp_path / "m.safetensors")
    assert torch.equal(model.head.weight, wanted)


def test_slices_go_to_their_shards(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    save_file({"w": whole}, tmp_path / "m.safetensors")
    rows, columns = torch.zeros(3, 4), torch.zeros(6, 2)

    class Sharded:
        def checkpoint_targets(self) -> dict[str, Any]:
            return {"w": (Target(rows, (slice(3, 6),)), Target(columns, (slice(None), slice(2, 4))))}

    load_safetensors(Sharded(), tmp_path / "m.safetensors")
    assert torch.equal(rows, whole[3:]) and torch.equal(columns, whole[:, 2:])


def test_dtype_words(tmp_path: Path) -> None:
    """U8, F8_E8M0, F4, BF16, F32 are read; F4 shapes count elements."""
    path = write(
        tmp_path / "m.safetensors",
        {
            "u8": ("U8", [2], b"\x7d\x01"),
            "scale": ("F8_E8M0", [2], b"\x7d\x7f"),
            "pairs": ("F4", [1, 4], b"\x21\xf7"),
            "bf16": ("BF16", [1], b"\x80\x3f"),
            "f32": ("F32", [1], struct.pack("<f", 1.5)),
        },
    )
    with TensorFile(path) as file:
        assert file.view("scale").float().tolist() == [0.25, 1.0]
        assert file.view("pairs").tolist() == [[0x21, 0xF7]]
        assert (file.view("bf16").item(), file.view("f32").item()) == (1.0, 1.5)
    scales = torch.zeros(2, dtype=torch.uint8)
    load_safetensors({"scale": scales}, path)
    assert scales.tolist() == [125, 127]


@pytest.mark.parametrize(
    ("word", "shape", "content", "text"),
    [
        ("F6_E2M3", [4], b"abc", r"w has dtype F6_E2M3, which is not known"),
        ("F4", [1, 3], b"\x00\x00", r"w is F4 with shape \(1, 3\)"),
        ("F32", [3], b"1234", r"does not fit bytes 0 to 4"),
        ("U8", [2, -1], b"", "whole numbers"),
    ],
)
def test_entries_that_cannot_be_right(tmp_path: Path, word: str, shape: list[int], content: bytes, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        load_safetensors({"w": torch.zeros(1)}, write(tmp_path / "m.safetensors", {"w": (word, shape, content)}))


def test_nothing_is_copied_when_anything_does_not_fit(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "2.safetensors")
    model = {"a": torch.zeros(2), "b": torch.zeros(4)}
    with pytest.raises(UsageError, match=r"b gives \(3,\), the model takes \(4,\)"):
        load_safetensors(model, [tmp_path / "1.safetensors", tmp_path / "2.safetensors"])
    with pytest.raises(UsageError, match="a is F32, the model takes int8"):
        load_safetensors({"a": torch.zeros(2, dtype=torch.int8)}, tmp_path / "1.safetensors")
    assert not model["a"].any()


def test_rounding_on_the_way_is_said(tmp_path: Path) -> None:
    save_file({"a": torch.full((2,), 1 + 2**-10)}, tmp_path / "m.safetensors")
    narrow = {"a": torch.zeros(2, dtype=torch.bfloat16)}
    with pytest.warns(RuntimeWarning, match="a was rounded from float32 to bfloat16"):
        report = load_safetensors(narrow, tmp_path / "m.safetensors")
    assert report.notes and narrow["a"].tolist() == [1.0, 1.0]


def test_scale_byte_255_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"x_scales": ("U8", [3], b"\xff\x7f\xff")})

    class Scales:
        def checkpoint_targets(self) -> dict[str, Any]:
            return {"x_scales": (Target(torch.zeros(3, dtype=torch.uint8), e8m0=True),)}

    with pytest.raises(UsageError, match=r"x_scales: 2 scale byte\(s\) are 255"):
        load_safetensors(Scales(), path)


class Folder:
    """Two shards and an index, to be damaged."""

    def __init__(self, root: Path) -> None:
        self.root = root
        save_file({"a": torch.ones(2)}, root / "1.safetensors")
        save_file({"b": torch.ones(2)}, root / "2.safetensors")
        self.index({"a": "1.safetensors", "b": "2.safetensors"})

    def index(self, weight_map: Any) -> None:
        (self.root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


MODEL = ("a", "b")


def _load(folder: Folder) -> Any:
    return load_safetensors({name: torch.zeros(2) for name in MODEL}, folder.root)


def test_an_index_and_its_files(tmp_path: Path) -> None:
    assert _load(Folder(tmp_path)).tensors == 2


def test_a_file_the_index_does_not_name_is_noted(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    save_file({"c": torch.ones(2)}, tmp_path / "3.safetensors")
    assert _load(folder).notes == ("3.safetensors is not in model.safetensors.index.json and was ignored",)


def test_index_and_files_must_agree_both_ways(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.index({"a": "1.safetensors", "b": "9.safetensors"})
    with pytest.raises(UsageError, match=r"names 9\.safetensors, which is not there"):
        _load(folder)
    folder.index({"a": "1.safetensors", "b": "1.safetensors"})
    with pytest.raises(UsageError, match=r"says b is in 1\.safetensors, but that file lacks it"):
        _load(folder)
    folder.index({"a": "1.safetensors", "b": "2.safetensors"})
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "2.safetensors")
    with pytest.raises(UsageError, match=r"a is in 2\.safetensors and in 1\.safetensors"):
        _load(folder)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(UsageError, match=r"a is in 1\.safetensors and in 2\.safetensors"):
        _load(folder)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "m.safetensors")
    with pytest.raises(UsageError, match=r"1 tensor\(s\) of the model are in none of the files, first b"):
        load_safetensors({name: torch.zeros(2) for name in MODEL}, tmp_path)


def test_a_tensor_may_start_at_an_odd_byte(tmp_path: Path) -> None:
    entries = {"odd": ("U8", [3], b"abc"), "w": ("F32", [1], struct.pack("<f", 2.5))}
    model = {"odd": torch.zeros(3, dtype=torch.uint8), "w": torch.zeros(1)}
    load_safetensors(model, write(tmp_path / "m.safetensors", entries))
    assert model["w"].item() == 2.5


@given(data=st.binary(max_size=80))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_file_content_is_a_traceback(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "fuzz.safetensors"
    for content in (data, struct.pack("<Q", len(data)) + data):
        path.write_bytes(content)
        try:
            load_safetensors({"w": torch.zeros(1)}, path)
        except UsageError as problem:
            assert "fuzz.safetensors" in str(problem) or "in none of the files" in str(problem)


_ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 1 << 70) | st.floats(allow_nan=False) | st.sampled_from(["F32", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(list(_ENTRY)), inner, max_size=3),
    max_leaves=6,
)


@given(key=st.sampled_from([*_ENTRY, None]), value=_JSON)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_header_entry_is_a_traceback(tmp_path: Path, key: str | None, value: Any) -> None:
    path = tmp_path / "fuzz.safetensors"
    header = json.dumps({"w": value if key is None else {**_ENTRY, key: value}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<f", 2.5))
    model = {"w": torch.zeros(1)}
    try:
        load_safetensors(model, path)
    except UsageError as problem:
        assert "fuzz.safetensors" in str(problem) and model["w"].item() == 0
    else:
        assert model["w"].item() == 2.5


@pytest.mark.parametrize(
    ("offsets", "data", "text"),
    [
        ([(0, 4), (0, 4)], 4, "overlaps another tensor"),
        ([(0, 4), (2, 6)], 6, "overlaps another tensor"),
        ([(0, 4), (8, 12)], 12, "leaves a hole"),
        ([(4, 8), (8, 12)], 12, "leaves a hole"),
        ([(0, 4), (4, 8)], 9, "end at byte 8 of 9"),
    ],
)
def test_tensors_must_fill_the_file(tmp_path: Path, offsets: list[tuple[int, int]], data: int, text: str) -> None:
    """As the safetensors library itself refuses them."""
    from safetensors import SafetensorError, safe_open

    header = {n: {"dtype": "F32", "shape": [1], "data_offsets": list(o)} for n, o in zip("ab", offsets, strict=True)}
    words = json.dumps(header).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(words)) + words + bytes(data))
    with pytest.raises(SafetensorError):
        safe_open(path, "pt")
    with pytest.raises(UsageError, match=text):
        load_safetensors({"a": torch.zeros(1), "b": torch.zeros(1)}, path)


def test_a_header_that_nests_without_end_is_refused(tmp_path: Path) -> None:
    words = b'{"w":' + b"[" * 100_000
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(words)) + words)
    with pytest.raises(UsageError, match="no safetensors file"):
        load_safetensors({"w": torch.zeros(1)}, tmp_path / "m.safetensors")


def test_a_tensor_is_never_twice_in_host_memory(tmp_path: Path) -> None:
    """Anonymous memory at its highest, in a child, beside the 192 MiB that the target itself takes."""
    nbytes = 192 << 20
    path = tmp_path / "m.safetensors"
    header = json.dumps({"w": {"dtype": "U8", "shape": [192, 1 << 20], "data_offsets": [0, nbytes]}}).encode()
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(8 + len(header) + nbytes)
    code = f"""
import torch
from dieplace.loading import load_safetensors
def anonymous():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon")) * 1024
target, before, peak = torch.ones(192, 1 << 20, dtype=torch.uint8), anonymous(), 0
real = torch.Tensor.copy_
def copy_(self, source):
    global peak
    result = real(self, source)
    peak = max(peak, anonymous())
    return result
torch.Tensor.copy_ = copy_
load_safetensors({{"w": target}}, {str(path)!r})
assert not target.any() and peak
print(peak - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    assert int(done.stdout) < 48 << 20
