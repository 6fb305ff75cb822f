"""The flags that plug our store into vLLM and SGLang, as a shell passes them on; vLLM's start."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foreword.cli import engines
from foreword.cli.engines import lora_folders
from foreword.cli.failure import EXIT_CODES, Failure
from foreword.cli.main import main


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 0
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    return line.strip()


def through_a_shell(line: str) -> list[str]:
    """What a program gets where `$(...)` gives this line."""
    command = ["sh", "-c", "printf '%s\\n' $(printenv LINE)"]
    done = subprocess.run(
        command, capture_output=True, check=True, text=True, env={**os.environ, "LINE": line}
    )
    return done.stdout.splitlines()


def option(words: list[str], name: str) -> Any:
    return json.loads(words[words.index(name) + 1])


def test_vllm_gets_its_flags_through_a_shell_without_quotes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my [kv] *?"
    line = printed(
        ["engine-args", "vllm", "--disk", f"2GiB:{folder}", "--host-bytes", "1GiB"], capsys
    )
    words = through_a_shell(line)
    config = option(words, "--kv-transfer-config")
    assert (config["kv_connector"], config["kv_load_failure_policy"]) == (
        "OffloadingConnector",
        "recompute",
    )
    extra = config["kv_connector_extra_config"]
    assert extra["cpu_bytes_to_use"] == 1 << 30
    assert extra["eviction_policy"] == "ForewordPolicy"
    assert extra["offload_prompt_only"] is False
    (tier,) = extra["secondary_tiers"]
    assert tier == {
        "type": "ForewordTier",
        "module_path": "foreword.plugins.vllm",
        "disk_bytes": 2 << 30,
        "disk_folder": str(folder),
    }
    assert folder.is_dir()
    rest = words[words.index("--kv-transfer-config") + 2 :]
    assert rest == ["--prefix-caching-hash-algo", "sha256_cbor", "--enable-prompt-tokens-details"]


def test_sglang_gets_its_flags_through_a_shell_without_quotes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a b"
    line = printed(
        ["engine-args", "sglang", "--disk", f"3GB:{folder}", "--host-bytes", "1500MB"], capsys
    )
    words = through_a_shell(line)
    extra = option(words, "--hicache-storage-backend-extra-config")
    assert extra["module_path"] == "foreword.plugins.sglang"
    assert (extra["disk_bytes"], extra["disk_folder"]) == (3 * 10**9, str(folder))
    assert words[: words.index("--hicache-storage-backend-extra-config")] == [
        *("--enable-cache-report", "--page-size", "64"),
        *("--enable-hierarchical-cache", "--hicache-size", "2"),
        *("--hicache-storage-backend", "dynamic"),
    ]
    assert "--hicache-size" not in printed(["engine-args", "sglang"], capsys)


def test_a_line_on_a_terminal_can_be_copied(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = printed(["engine-args", "vllm"], capsys)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    quoted = printed(["engine-args", "vllm"], capsys)
    copied = subprocess.run(
        ["sh", "-c", f"printf '%s\\n' {quoted}"], capture_output=True, check=True, text=True
    )
    assert copied.stdout.splitlines() == bare.split(" ")


def test_without_disk_there_is_no_tier_below(capsys: pytest.CaptureFixture[str]) -> None:
    words = printed(["engine-args", "vllm", "--disk", "0"], capsys).split(" ")
    config = option(words, "--kv-transfer-config")
    assert config["kv_connector_extra_config"]["secondary_tiers"] == []


@pytest.mark.parametrize(
    ("line", "folders"),
    [
        ("model --port 8000", []),
        ("model --lora-modules a=/x b=y/z --port 8000 c=/no", ["/x", "y/z"]),
        ("model --lora-modules=a=/x --enable-lora", ["/x"]),
        ('model --lora_modules {"name":"a","path":"/x","base_model_name":"b"}', ["/x"]),
        ("model --lora-modules a=/x --lora-modules b=/y", ["/x", "/y"]),
    ],
)
def test_adapters_are_found_among_vllms_flags(line: str, folders: list[str]) -> None:
    assert lora_folders(line.split()) == folders


def test_adapters_are_told_to_the_tier(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["engine-args", "vllm", "model", "--enable-lora", "--lora-modules", "a=/x"]
    config = option(printed(words, capsys).split(" "), "--kv-transfer-config")
    (tier,) = config["kv_connector_extra_config"]["secondary_tiers"]
    assert tier["lora_folders"] == ["/x"]
    with pytest.raises(Failure, match="neither NAME=PATH nor JSON"):
        lora_folders(["--lora-modules", "nothing"])


class Became(Exception):
    """The process would be another program now."""


def test_serve_becomes_vllm_and_the_users_flags_come_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def become(program: str, words: list[str]) -> None:
        raise Became(program, words)

    monkeypatch.setattr(engines.os, "execv", become)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "vllm").touch(mode=0o755)
    words = ["serve", "--engine", "vllm", "--disk", "1GiB", "model", "--port", "9000"]
    with pytest.raises(Became) as became:
        main(words)
    program, argv = became.value.args
    assert program == str(tmp_path / "vllm")
    assert argv[:4] == ["vllm", "serve", "model", "--kv-transfer-config"]
    assert argv[-2:] == ["--port", "9000"]
    here = tmp_path / "bin"
    here.mkdir()
    (here / "vllm").touch()
    monkeypatch.setattr(sys, "executable", str(here / "python"))
    with pytest.raises(Became) as became:
        main(words)
    assert became.value.args[0] == str(here / "vllm")


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ("serve --engine vllm", "usage", "which model?"),
        ("serve --engine vllm model --disk 1GiB", "usage", "--disk goes before the model"),
        ("serve --engine vllm model --kv-transfer-config {}", "usage", "is set here already"),
        ("serve --engine vllm model --kv-transfer-config.kv_role x", "usage", "set here already"),
        ("serve --engine vllm model", "install", "vllm is not installed here"),
        ("serve --disk 1GiB --engine vllm model", "usage", "`foreword serve --engine vllm MODEL`"),
        ("serve --engine sglang model", "usage", "`foreword serve --engine vllm MODEL`"),
        ("engine-args vllm --host-bytes 0", "settings", "passes through it"),
        ("engine-args vllm --disk 1GiB:/dev/null", "settings", "is no folder"),
        ("engine-args", "usage", "no command 'engine-args'"),
        ("engine-args trt", "usage", "no command 'engine-args trt'"),
    ],
)
def test_mistakes_are_one_line(
    line: str,
    kind: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(line.split()) == EXIT_CODES[kind]
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1
