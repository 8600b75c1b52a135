"""Whether weights are finite, read from the file alone."""

import math
import struct

import pytest
import torch
from safetensors.torch import save_file

from tunewatch.finetune import weights
from tunewatch.finetune.weights import check_file, check_weights

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_infinities_are_counted_by_tensor(tmp_path, dtype):
    bad = torch.tensor([1.0, math.nan, -2.0, math.inf, -math.inf, 0.0]).to(dtype)
    largest = torch.tensor(
        [torch.finfo(dtype).max, torch.finfo(dtype).min, torch.finfo(dtype).tiny], dtype=dtype
    )
    save_file(
        {"bad": bad, "largest": largest, "zero": torch.zeros(0, dtype=dtype)}, tmp_path / "m.safetensors"
    )
    report = check_weights(tmp_path)
    assert report.nonfinite == {"bad": 3}
    assert (report.tensors, report.values, report.finite) == (3, 9, False)


def test_the_float8_format_without_infinity(tmp_path):
    values = torch.tensor([1.0, math.nan, 448.0, -448.0]).to(torch.float8_e4m3fn)
    save_file({"w": values}, tmp_path / "m.safetensors")
    assert check_weights(tmp_path).nonfinite == {"w": 1}


def test_integers_are_finite_whatever_their_bits(tmp_path):
    save_file(
        {"ids": torch.full((4,), -1, dtype=torch.int32), "w": torch.ones(2)}, tmp_path / "m.safetensors"
    )
    assert check_weights(tmp_path).finite


def test_a_single_nan_behind_many_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "_CHUNK_BYTES", 64)
    tensor = torch.ones(1001, dtype=torch.bfloat16)
    tensor[1000] = math.nan
    save_file({"w": tensor, "v": torch.ones(33)}, tmp_path / "m.safetensors")
    report = check_weights(tmp_path)
    assert report.nonfinite == {"w": 1} and report.values == 1034


def test_all_shards_are_read(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.full((3,), math.inf)}, tmp_path / "model-00002-of-00002.safetensors")
    report = check_weights(tmp_path)
    assert report.tensors == 2 and report.nonfinite == {"b": 3}
    assert check_weights(tmp_path / "nothing-here").tensors == 0


def test_files_that_are_not_whole(tmp_path):
    file = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(100)}, file)
    whole = file.read_bytes()
    for content, message in [
        (whole[:-8], "is cut short"),
        (whole[:20], "not a whole safetensors file"),
        (b"", "not a whole safetensors file"),
        (struct.pack("<Q", 1 << 40) + b"{}", "not a whole safetensors file"),
    ]:
        file.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            check_file(file)
