"""The `foreword` command: finds the subcommand, reads its arguments, runs it.

A command is a module with `add_arguments(parser)` and `run(args)`, imported only when it is asked
for. `run` returns an exit code; or a text to print; or a measurement: printed, as JSON with
`--json`, and an exit code of 1 where it has an `ok` that is false.
"""

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn

import foreword.engine  # noqa: F401 - says how OpenMP waits, before any command imports torch
from foreword import __version__
from foreword.cli.config import configured
from foreword.cli.failure import EXIT_CODES, Failure

# name: (module, measures, what it does)
COMMANDS = {
    "serve": ("foreword.cli.serve", False, "an OpenAI-compatible server"),
    "serve --engine vllm": ("foreword.cli.engines", False, "vLLM, with our store below its cache"),
    "engine-args vllm": ("foreword.cli.engines", False, "the flags that plug our store into vLLM"),
    "engine-args sglang": ("foreword.cli.engines", False, "the same for SGLang"),
    "calibrate": ("foreword.cli.calibrate", True, "what prefill, decode and loading cost here"),
    "chat": ("foreword.cli.chat", False, "talk with a model, and see what each turn reused"),
    "cache stats": ("foreword.cli.cache", True, "what a running server's cache has done"),
    "cache path": ("foreword.cli.cache", False, "where this machine keeps KV on disk"),
    "cache clear": ("foreword.cli.cache", True, "let a running server forget all prefixes"),
    "cache worth": ("foreword.cli.whatif", True, "whom a running server's cache serves, and gains"),
    "whatif": ("foreword.cli.whatif", True, "what a running server's cache would find with more"),
    "events": ("foreword.cli.events", False, "what workers say that their caches gain and lose"),
    "replay": ("foreword.cli.replay", False, "what a cache would have reused of recorded traffic"),
    "plan": ("foreword.cli.plan", True, "which sizes of cache a model, a machine, traffic ask for"),
    "trace show": ("foreword.cli.trace", False, "what is in a trace, and how much of it repeats"),
    "trace anonymise": ("foreword.cli.trace", False, "a trace without text, token ids and names"),
    "bench chat": ("foreword.cli.bench_chat", True, "tokens prefilled in a long chat"),
    "bench ttft": ("foreword.cli.bench_ttft", True, "time to the first token, cold and warm"),
    "bench meet": ("foreword.cli.bench_meet", True, "a prefix loaded and computed at once"),
    "bench overhead": ("foreword.cli.bench_overhead", True, "what the cache costs without hits"),
    "bench load": ("foreword.cli.bench_load", True, "many streams, some left; what stays behind"),
    "bench soak": ("foreword.cli.bench_soak", True, "minutes of load that no tier has room for"),
    "bench transformers": (
        "foreword.cli.bench_transformers",
        True,
        "the engine against plain transformers",
    ),
    "bench quality": (
        "foreword.cli.bench_quality",
        True,
        "quantised weights against bfloat16: quality and speed",
    ),
    "bench restore": (
        "foreword.cli.bench_restore",
        True,
        "blocks from host memory and disk, beside memcpy and fio",
    ),
    "bench schedule": (
        "foreword.cli.bench_schedule",
        True,
        "trees of prompts in each order of waiting requests, in virtual time",
    ),
    "bench regret": (
        "foreword.cli.bench_regret",
        True,
        "is any request slower with the cache, whatever the tier? In virtual time",
    ),
    "verify": (
        "foreword.cli.verify_store",
        True,
        "does reuse change any answer, does a fault of a store?",
    ),
}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, not below a page of usage."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if unknown:
            word = unknown[1].split("=")[0]
            names = [name for name in self._option_string_actions if name.startswith("--")]
            near = difflib.get_close_matches(word, names, n=1)
            if not near and not word.startswith("-") and "--model" in names:
                near = [f"--model {word}"]
            if word == "--engine":  # a command of its own
                message += "; there is `foreword serve --engine vllm MODEL`, in this order"
            elif near:
                message += f"; did you mean {near[0]}?"
        raise Failure(f"{message} (see {self.prog} --help)", "usage")


def command_parser(name: str) -> argparse.ArgumentParser:
    """The parser of one command. Imports its module."""
    module_name, measures, summary = COMMANDS[name]
    parser = Parser(prog=f"foreword {name}", description=summary, allow_abbrev=False)
    parser.set_defaults(command=name)
    import_module(module_name).add_arguments(parser)
    if measures:
        parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def overview() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:{width}}{summary}" for name, (_, _, summary) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: foreword COMMAND [OPTIONS]",
            "",
            "KV-cache reuse for LLM serving: never prefill twice.",
            "",
            *lines,
            "",
            "foreword COMMAND --help lists a command's options; foreword --version says which.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] == "--version":
        print(f"foreword {__version__}")
        return 0
    said = [name for name in COMMANDS if name.split() == words[: len(name.split())]]
    name = max(said, key=len, default=None)
    if name is None:
        grouped = words[0] in ("bench", "cache", "engine-args", "trace")
        wish = " ".join(words[:2] if grouped else words[:1])
        near = [one for one in COMMANDS if grouped and one.split()[0] == words[0]] or COMMANDS
        print(f"foreword: no command {wish!r}; there are {', '.join(near)}", file=sys.stderr)
        return EXIT_CODES["usage"]
    try:
        parser, words = command_parser(name), words[len(name.split()) :]
        if parser.get_default("config") is not None:
            words = configured(parser, words)
        args = parser.parse_args(words)
        result = import_module(COMMANDS[name][0]).run(args)
        return result if isinstance(result, int) else _report(result, args)
    except KeyboardInterrupt:
        return EXIT_CODES["interrupted"]
    except BrokenPipeError:  # who reads has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        failure = Failure.of(error)
        if failure is None:
            raise
        print(f"foreword {name}: {failure}", file=sys.stderr)
        return failure.exit_code


def _report(result: Mapping[str, Any] | str, args: argparse.Namespace) -> int:
    if isinstance(result, str):
        text, ok = result, True
    else:
        text = json.dumps(result, indent=2) if args.json else "\n".join(_lines(result))
        ok = result.get("ok", True)
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Failure(f"the result cannot be written: {error.strerror}", "failed") from error
    return 0 if ok else 1


def _lines(result: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, value in result.items():
        if isinstance(value, Mapping):
            yield from _lines(value, f"{path}{key}.")
        else:
            yield f"{path}{key:<{max(1, 40 - len(path))}} {_figure(value)}"


def _figure(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return " ".join(map(_figure, value)) if isinstance(value, list | tuple) else str(value)


if __name__ == "__main__":
    sys.exit(main())
