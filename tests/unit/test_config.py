"""Settings from flags, the environment and a file: one wins, each is checked, faults are named."""

from pathlib import Path
from typing import Any

import pytest

from foreword.cli.config import configured
from foreword.cli.failure import EXIT_CODES, Failure
from foreword.cli.main import COMMANDS, command_parser, main
from foreword.cli.settings import api_keys


def settings(words: str = "") -> Any:
    parser = command_parser("serve")
    return parser.parse_args(configured(parser, words.split()))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "foreword.toml"


def test_flags_win_over_the_environment_and_that_over_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(
        """
        port = 1001
        name = "of the file"
        dtype = "float32"
        json = true
        policy = ["evict=fifo", "store=write-back"]
        cors-origins = ["https://a.example", "https://b.example"]
        max-model-len = 77
        """
    )
    monkeypatch.setenv("FOREWORD_CONFIG", str(file))
    monkeypatch.setenv("FOREWORD_PORT", "1002")
    monkeypatch.setenv("FOREWORD_NAME", "of the environment")
    args = settings("--port 1003")
    assert (args.port, args.name, args.dtype) == (1003, "of the environment", "float32")
    assert args.json is True
    assert args.policy == {
        "evict": "fifo",
        "store": "write-back",
        "order": "longest-prefix",
        "reuse": "on",
    }
    assert args.max_model_len == 77
    assert args.cors_origins == ("https://a.example", "https://b.example")


def test_a_file_named_by_a_flag_wins_over_one_of_the_environment(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("port = 1001")
    other = tmp_path / "other.toml"
    other.write_text("port = 1002")
    monkeypatch.setenv("FOREWORD_CONFIG", str(other))
    assert settings().port == 1002
    assert settings(f"--config {file}").port == 1001


def test_switches_can_be_off(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("json = false")
    assert settings(f"--config {file}").json is False
    monkeypatch.setenv("FOREWORD_JSON", "1")
    assert settings().json is True


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", "prot is no setting; did you mean port?"),
        ("port = 70000", "'70000' is no port"),
        ("port = true", "port is True"),
        ("json = 1", "true or false"),
        (
            "policy = 'evict=best'",
            "there is no evict=best; it may be gittins, lru, lru-2, arc, s3-fifo, fifo",
        ),
        ("port = {a = 1}", "port is {'a': 1}"),
        ("config = 'other.toml'", "config is no setting"),
        ("dtype = 'float16'", "bfloat16"),
        ("port = ", "cannot be read"),
        ("[serve]", "serve is no setting"),
    ],
)
def test_a_fault_in_the_file_is_named(file: Path, text: str, words: str) -> None:
    file.write_text(text)
    with pytest.raises(Failure) as failed:
        settings(f"--config {file}")
    assert str(file) in str(failed.value)
    assert words in str(failed.value)
    assert failed.value.exit_code == EXIT_CODES["usage"]


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("FOREWORD_PROT", "1", "FOREWORD_PROT is no setting; did you mean FOREWORD_PORT?"),
        ("FOREWORD_PORT", "x", "the environment: argument --port: 'x' is no port"),
        ("FOREWORD_JSON", "maybe", "true or false"),
        ("FOREWORD_POLICY", "reuse", "there is no reuse=; it may be on, off"),
    ],
)
def test_a_fault_in_the_environment_is_named(
    variable: str,
    value: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, value)
    assert main(["serve"]) == EXIT_CODES["usage"]
    assert words in capsys.readouterr().err


def test_other_variables_and_commands_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREWORD_CACHE_DIR", "/somewhere")
    assert settings().port == 8000
    with_file = [
        name for name in COMMANDS if command_parser(name).get_default("config") is not None
    ]
    assert with_file == ["serve"]


def test_api_keys_are_lines(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    assert api_keys(None) == []
    file.write_text("# of the team\n one \n\ntwo\n")
    assert api_keys(file) == ["one", "two"]
    file.write_text("# none\n")
    with pytest.raises(Failure, match="holds no key"):
        api_keys(file)
    with pytest.raises(Failure, match="No such file"):
        api_keys(tmp_path / "nowhere")
    for key in ("kéy", "a key"):
        file.write_text(f"one\n{key}\n")
        with pytest.raises(Failure, match="that a header cannot"):
            api_keys(file)
