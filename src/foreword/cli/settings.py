"""What a user may choose about `foreword serve`: the flags, and the settings that they become."""

import argparse
import os
import re
from pathlib import Path

from foreword.cli.failure import Failure
from foreword.cli.policies import add_policy_flag
from foreword.engine.settings import KINDS, EngineSettings, check_quantisation
from foreword.store.files import kv_folder

KV_BYTES_MAX = 4 << 30  # of the default; more by asking for it
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
UNITS = {"": 1} | {
    name: base**power
    for power, letter in enumerate("KMGT", start=1)
    for name, base in ((f"{letter}B", 1000), (f"{letter}IB", 1024))
}


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="smollm2",
        help="smollm2, a Hugging Face folder, a GGUF file, or ORG/NAME of the Hugging Face hub",
    )
    parser.add_argument("--name", help="what clients call the model (default: the model's own)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float32", *KINDS),
        help="int4 and int8 are bfloat16 with weights in fewer bits, on the CPU: decodes quicker, "
        "prefills slower",
    )
    parser.add_argument("--max-model-len", type=count, help="context in tokens (the model's own)")
    parser.add_argument(
        "--kv-bytes",
        type=size,
        help="memory for KV, such as 2GiB (a quarter of this machine's, at most 4GiB)",
    )
    add_tier_flags(
        parser,
        "memory for KV that the device evicts (0 with --device cpu, else a quarter of this "
        "machine's)",
    )
    parser.add_argument("--max-num-seqs", type=count, default=64, help="sequences in one step")
    parser.add_argument(
        "--max-queue", type=count, default=256, help="sequences that may wait; more get a 429"
    )
    parser.add_argument(
        "--exact",
        default="auto",
        choices=("auto", "off"),
        help="auto: reuse changes no bit of an answer, where this machine can promise it",
    )
    add_policy_flag(parser)
    parser.add_argument(
        "--threads",
        type=count,
        help="CPU threads (torch's own choice); in exact mode KV on disk is for one number of them",
    )


def add_tier_flags(parser: argparse.ArgumentParser, host_help: str) -> None:
    parser.add_argument("--host-bytes", type=size_or_none, help=host_help)
    parser.add_argument(
        "--disk",
        type=disk,
        default="10GiB",
        metavar="SIZE[:DIR]",
        help="disk for KV, which a restart finds again, in a folder that several servers may share "
        "(10GiB, where `foreword cache path` says); 0 keeps none",
    )


def add_listen_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=port, default=8000, help="0 takes a free one")
    parser.add_argument(
        "--api-keys",
        type=Path,
        metavar="FILE",
        help="ask for an API key, one of this file's lines; each has a cache of its own",
    )
    parser.add_argument(
        "--cors-origins",
        type=origins,
        default=(),
        metavar="ORIGINS",
        help="web pages that may call from a browser, with commas between; * for all",
    )
    parser.add_argument(
        "--warm",
        type=Path,
        metavar="FILE",
        help="prefill these prompts before the port opens: a request as JSON in each line",
    )
    parser.add_argument(
        "--request-log",
        type=Path,
        metavar="FILE",
        help="add a line for each request to this file, with its prompt and answer as token ids, "
        "for a replay",
    )
    parser.add_argument("--config", default="", metavar="FILE", help="a TOML file of these options")
    parser.add_argument("--json", action="store_true", help="log and banner as JSON lines")
    parser.add_argument(
        "--kv-events",
        metavar="ENDPOINT[,FORM]",
        help="publish what the cache gains and loses, as vLLM does: tcp://127.0.0.1:5557, old "
        "batches on the next port; the prompts' tokens are in it; FORM for readers that want it "
        "is arrays or maps",
    )


def engine_settings(args: argparse.Namespace) -> EngineSettings:
    """The engine that the flags ask for. Raises Failure for what cannot be, as far as that shows
    before torch is imported, which takes seconds."""
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", args.device):
        raise Failure(f"--device {args.device} cannot be used: cpu, cuda or cuda:N", "settings")
    dtype, quantise = ("bfloat16", args.dtype) if args.dtype in KINDS else (args.dtype, None)
    if quantise:
        try:
            check_quantisation(quantise, dtype, args.device)
        except ValueError as error:
            raise Failure(str(error), "settings") from error
    memory_bytes = physical_memory_bytes()
    host_bytes = args.host_bytes
    if host_bytes is None:  # of what is main memory already a second copy is no gain
        host_bytes = 0 if args.device == "cpu" else memory_bytes // 4
    kv_bytes = args.kv_bytes or default_kv_bytes(memory_bytes)
    for flag, num_bytes in (
        ("--kv-bytes", kv_bytes if args.device == "cpu" else 0),
        ("--host-bytes", host_bytes),
    ):
        if num_bytes > memory_bytes:
            raise Failure(
                f"{flag} {num_bytes} is more than this machine's memory, {memory_bytes} bytes",
                "settings",
            )
    disk_bytes, disk_folder = args.disk
    if disk_bytes and disk_folder:
        check_folder(disk_folder)
    return EngineSettings(
        model=args.model,
        served_name=args.name,
        device=args.device,
        dtype=dtype,
        max_model_len=args.max_model_len,
        kv_bytes=kv_bytes,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        disk_folder=disk_folder or kv_folder(),
        max_num_seqs=args.max_num_seqs,
        max_queue=args.max_queue,
        exact=args.exact == "auto",
        prefix_caching=args.policy["reuse"] == "on",
        evict=args.policy["evict"],
        store=args.policy["store"],
        order=args.policy["order"],
        num_threads=args.threads,
        quantise=quantise,
    )


def check_folder(folder: Path) -> None:
    """Make a folder for KV where there is none. Raises Failure."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(f"--disk {folder} is no folder: {error.strerror}", "settings") from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise Failure(f"--disk {folder} cannot be written", "settings")


def api_keys(path: Path | None) -> list[str]:
    """The lines of a file that are not empty and no comment. Raises Failure where there are none:
    a server that was to ask for keys must not go without."""
    if path is None:
        return []
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Failure(f"--api-keys {path} cannot be read: {reason}", "settings") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise Failure(f"--api-keys {path} holds no key", "settings")
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise Failure(
            f"--api-keys {path} holds a key that a header cannot: letters, digits and signs of "
            "ASCII, no blanks",
            "settings",
        )
    return keys


def origins(text: str) -> tuple[str, ...]:
    """Origins as browsers send them: https://chat.example.org, no path."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    for origin in found:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise argparse.ArgumentTypeError(
                f"{origin!r} is no origin: write it as https://chat.example.org"
            )
    return found


def size(text: str) -> int:
    """Bytes of "2GiB", "500 MB" or "1048576"."""
    match = re.fullmatch(
        r"(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]i?B|)", text.strip(), re.ASCII | re.IGNORECASE
    )
    num_bytes = int(float(match[1]) * UNITS[match[2].upper()]) if match else 0
    if num_bytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write it as 2GiB, 500MB or bytes")
    return num_bytes


def size_or_none(text: str) -> int:
    """As `size`, and 0."""
    return 0 if text.strip() == "0" else size(text)


def disk(text: str) -> tuple[int, Path | None]:
    """A size, 0 too, and the folder after a colon if there is one."""
    num_bytes, colon, folder = text.partition(":")
    if colon and not folder:
        raise argparse.ArgumentTypeError(f"{text!r} names no folder: write it as 10GiB:/mnt/kv")
    if not colon and "/" in text:
        raise argparse.ArgumentTypeError(f"{text!r} names no size: write it as 10GiB:{text}")
    return size_or_none(num_bytes), Path(folder) if folder else None


def count(text: str) -> int:
    """A whole number from 1."""
    if not re.fullmatch(r"[0-9]{1,12}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def port(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 0 to 65535")
    return int(text)


def physical_memory_bytes() -> int:
    """What this process may use at most: the machine's memory, or its container's if less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int(CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no such limit here, or it says "max"
        return machine


def default_kv_bytes(memory_bytes: int) -> int:
    """The pool's memory is only touched as it fills, so a quarter is no burden at first."""
    return min(memory_bytes // 4, KV_BYTES_MAX)
