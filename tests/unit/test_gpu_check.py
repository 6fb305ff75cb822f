"""`make gpu-check` where there is no GPU: it says so, and on the CPU all of it runs."""

import json

import pytest
import torch

import gpu_check


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 0
    assert "no CUDA device" in json.loads(capsys.readouterr().out)["skipped"]


def test_all_of_it_runs_on_the_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "COPY_BYTES", 1 << 20)
    words = ["--device", "cpu", "--layers", "1", "--hidden", "64", "--lengths", "64", "128"]
    assert gpu_check.main(words) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["bandwidth"]) == {
        f"{way}_gb_per_s" for way in ("out", "in", "plain_out", "plain_in")
    }
    assert [row["tokens"] for row in result["ttft"]] == [64, 128]
    for row in result["ttft"]:
        assert row["device_tokens"] == row["tokens"] - 1
        assert row["host_tokens"] == row["disk_tokens"] == row["tokens"] - 16
