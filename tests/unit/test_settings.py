"""The command line's own reading: sizes, flags and defaults, failures, what commands print."""

import argparse
import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foreword import __version__
from foreword.cli import main as cli
from foreword.cli.failure import EXIT_CODES, Failure
from foreword.cli.serve import banner, bind, check_device, url
from foreword.cli.settings import (
    default_kv_bytes,
    engine_settings,
    physical_memory_bytes,
    size,
)
from foreword.engine.settings import EngineSettings
from foreword.store.files import kv_folder

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("2GiB", 2 * GIB),
        ("1.5 gib", 3 * GIB // 2),
        ("500MB", 500_000_000),
        ("7", 7),
        ("1kib", 1024),
    ],
)
def test_size(text: str, num_bytes: int) -> None:
    assert size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "0", "-1", "2 apples", "1e9", "nan", "0.1"])
def test_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="no size"):
        size(text)


def test_default_pool_is_a_quarter_of_memory_up_to_a_bound() -> None:
    assert default_kv_bytes(8 * GIB) == 2 * GIB
    assert default_kv_bytes(1000 * GIB) == 4 * GIB
    assert 0 < physical_memory_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_container_bounds_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr("foreword.cli.settings.CGROUP_LIMIT", limit)
    machine = physical_memory_bytes()
    limit.write_text("max\n")
    assert physical_memory_bytes() == machine
    limit.write_text("4096\n")
    assert physical_memory_bytes() == 4096


def test_flags_default_to_the_engine_s_own() -> None:
    args = cli.command_parser("serve").parse_args(["--kv-bytes", "1GiB"])
    assert (args.host, args.port) == ("127.0.0.1", 8000)
    assert engine_settings(args) == EngineSettings(
        kv_bytes=GIB, disk_bytes=10 * GIB, disk_folder=kv_folder()
    )


def test_every_flag_reaches_the_engine() -> None:
    line = (
        "--model here --name there --device cuda:1 --dtype float32 --max-model-len 100 "
        "--kv-bytes 3GB --max-num-seqs 5 --max-queue 6 --exact off --threads 7 "
        "--policy evict=fifo,store=on-second-use,reuse=off "
        "--host-bytes 2MB --disk 3MB:there"
    )
    assert engine_settings(cli.command_parser("serve").parse_args(line.split())) == EngineSettings(
        model="here",
        served_name="there",
        device="cuda:1",
        dtype="float32",
        max_model_len=100,
        kv_bytes=3_000_000_000,
        max_num_seqs=5,
        max_queue=6,
        exact=False,
        prefix_caching=False,
        evict="fifo",
        store="on-second-use",
        num_threads=7,
        host_bytes=2_000_000,
        disk_bytes=3_000_000,
        disk_folder=Path("there"),
    )
    args = cli.command_parser("serve").parse_args(["--dtype", "int8"])
    chosen = engine_settings(args)
    assert (chosen.dtype, chosen.quantise) == ("bfloat16", "int8")


def test_more_pool_than_memory_is_refused() -> None:
    args = cli.command_parser("serve").parse_args(["--kv-bytes", "1000TB"])
    with pytest.raises(Failure, match="more than this machine's memory"):
        engine_settings(args)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--port 70000", "no port"),
        ("--dtype float16", "bfloat16"),
        ("--max-model-len 0", "whole number"),
        ("--kv-bytes much", "no size"),
        ("--disk much", "no size"),
        ("--disk 10GiB:", "names no folder"),
        ("--thread 2", "did you mean --threads?"),
        ("smollm2", "did you mean --model smollm2?"),
        ("--policy lru", "rules are evict, store, order, reuse"),
        ("--policy store=all", "no store=all; it may be gain, write-through, on-second-use"),
        ("--policy reuse=on,reuse=off", "reuse is given twice: as on and off"),
        ("--nothing-like-it", "unrecognized arguments: --nothing-like-it (see"),
        ("--cors-origins example.org/page", "no origin"),
        ("--exact always", "auto"),
        ("--config /nowhere.toml", "/nowhere.toml cannot be read: No such file"),
    ],
)
def test_bad_flags_say_so_in_one_line(
    line: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", *line.split()]) == EXIT_CODES["usage"]
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1


def test_a_taken_port_is_known_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code = cli.main(["serve", "--model", "/nowhere", "--port", str(port)])
    assert code == EXIT_CODES["address"]
    assert f"127.0.0.1:{port}" in capsys.readouterr().err
    with pytest.raises(Failure, match="cannot listen"):
        bind("192.0.2.1", 0)  # an address that no machine has


def test_listener_is_tcp_by_name() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_a_device_that_is_not_here_is_refused() -> None:
    check_device("cpu")
    with pytest.raises(Failure, match="--device cuda:99 cannot be used"):
        check_device("cuda:99")


MISTAKES = {
    "a device": ("--device gpu", "settings", "--device gpu cannot be used"),
    "memory": ("--kv-bytes 1000TB", "settings", "more than this machine's memory"),
    "a choice": ("--dtype int4 --device cuda", "settings", "int4 weights need bfloat16"),
    "no model": ("--model nowhere", "model", "no model at 'nowhere'"),
    "no folder": ("--model .", "model", "no Hugging Face model folder: it has no config.json"),
    "no file": ("--model keys", "model", "neither a folder nor a .gguf file"),
    "no gguf": ("--model x.gguf", "model", "x.gguf is no GGUF file"),
    "not cached": ("--model org/name", "model", "org/name is not in the hub's cache"),
    "keys": ("--api-keys nowhere", "settings", "--api-keys nowhere cannot be read"),
    "warm": ("--warm keys", "settings", "--warm keys, line 1"),
    "host": ("--host 192.0.2.1", "address", "cannot listen on 192.0.2.1:0"),
    "toml": ("--config keys", "usage", "keys cannot be read"),
}


def test_mistakes_show_before_torch_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line each, in one process that never waits for torch."""
    (tmp_path / "keys").write_text("no key of TOML")
    (tmp_path / "x.gguf").write_text("no GGUF")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    program = (
        "import sys; from foreword.cli.main import main\n"
        "for line in sys.argv[1:]: print(main(['serve', '--port', '0', *line.split()]))\n"
        "sys.exit('torch' in sys.modules)"
    )
    lines = [line for line, _, _ in MISTAKES.values()]
    done = subprocess.run(
        [sys.executable, "-c", program, *lines],
        capture_output=True,
        check=False,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
    )
    codes, said = done.stdout.split(), done.stderr.splitlines()
    assert codes == [str(EXIT_CODES[kind]) for _, kind, _ in MISTAKES.values()]
    for (line, _, words), message in zip(MISTAKES.values(), said, strict=True):
        assert message.startswith("foreword serve: "), line
        assert words in message
    assert done.returncode == 0, "torch was imported"


def test_exit_codes_differ() -> None:
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)


def test_a_missing_package_is_named() -> None:
    failure = Failure.of(ModuleNotFoundError("No module", name="transformers"))
    assert failure is not None
    assert (failure.exit_code, str(failure)) == (
        EXIT_CODES["install"],
        "transformers is not installed: pip install 'foreword[engine]'",
    )
    assert Failure.of(ModuleNotFoundError("No module", name="foreword.gone")) is None
    assert Failure.of(RuntimeError("a bug")) is None


@pytest.mark.parametrize("line", ["events tcp://h:1", "serve --port 0 --kv-events tcp://h:1"])
def test_an_extra_that_is_missing_is_named(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("foreword.cli.events", "foreword.router.subscriber", "foreword.server.publisher"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "zmq", None)
    assert cli.main(line.split()) == EXIT_CODES["install"]
    assert "zmq is not installed: pip install 'foreword[events]'\n" in capsys.readouterr().err


def test_a_missing_model_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("foreword"), "handlers", [])
    assert cli.main(["serve", "--model", "/nowhere", "--port", "0"]) == EXIT_CODES["model"]
    message = capsys.readouterr().err
    assert message.startswith("foreword serve: ")
    assert "/nowhere" in message
    assert message.count("\n") == 1


def test_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in cli.COMMANDS)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"foreword {__version__}\n"
    assert cli.main(["bench", "fast"]) == EXIT_CODES["usage"]
    assert "no command 'bench fast'" in capsys.readouterr().err


def test_help_needs_no_torch() -> None:
    program = (
        "import sys; from foreword.cli.main import main; main(['--help']);"
        "import contextlib\nwith contextlib.suppress(SystemExit): main(['serve', '--help'])\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=False, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "--kv-bytes" in done.stdout


def test_measurements_print_as_json_or_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result: dict[str, Any] = {"ok": False, "cold_s": {"median": 0.123456, "all": [1, 2.5]}}
    module = SimpleNamespace(add_arguments=lambda parser: None, run=lambda args: result)
    monkeypatch.setattr(cli, "import_module", lambda name: module)
    assert cli.main(["verify", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == result
    result["ok"] = True
    assert cli.main(["bench", "chat"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["ok", "True"], ["cold_s.median", "0.1235"], ["cold_s.all", "1", "2.5"]]


def test_banner_gives_a_command_that_works() -> None:
    address = url("0.0.0.0", 8000)
    text = banner({"URL": f"{address}/v1", "exact": "yes: checked"}, "it's", address)
    assert "URL      http://127.0.0.1:8000/v1" in text
    assert "exact    yes: checked" in text
    command = text.split("Try it:\n")[1].replace("curl ", "printf '%s\\n' ", 1)
    words = subprocess.run(
        ["sh", "-c", command], capture_output=True, check=True, text=True
    ).stdout.splitlines()
    assert words[0] == "http://127.0.0.1:8000/v1/chat/completions"
    assert json.loads(words[-1])["model"] == "it's"
    assert url("::1", 80) == "http://[::1]:80"
