"""Our store as the outer cache of vLLM or SGLang: `foreword engine-args vllm` prints the flags that
plug it in, and `foreword serve --engine vllm` runs vLLM with them."""

import argparse
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foreword.cli.failure import Failure
from foreword.cli.settings import (
    add_tier_flags,
    check_folder,
    default_kv_bytes,
    physical_memory_bytes,
)

TRANSFER = "--kv-transfer-config"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command = parser.get_default("command")
    host = "host memory for KV, such as 4GiB "
    if command == "engine-args sglang":
        add_tier_flags(parser, host + "(SGLang's own choice: twice the device's)")
        return
    add_tier_flags(parser, host + "(a quarter of this machine's, at most 4GiB)")
    own = "vLLM's model, then any flags of vLLM"
    if command == "engine-args vllm":
        own += "; only --lora-modules changes what is printed"
    parser.add_argument("model", nargs=argparse.REMAINDER, metavar="MODEL ...", help=own)


def run(args: argparse.Namespace) -> int:
    """Raises Failure for what cannot be. Does not return where it becomes vLLM."""
    num_bytes, folder = args.disk
    if folder is not None:
        check_folder(folder)
        folder = folder.resolve()  # the engine may start elsewhere
    if args.command == "engine-args sglang":
        flags = sglang_flags(args.host_bytes, num_bytes, folder)
    else:
        host_bytes = args.host_bytes
        if host_bytes == 0:
            raise Failure("--host-bytes 0: what vLLM keeps on disk passes through it", "settings")
        host_bytes = host_bytes or default_kv_bytes(physical_memory_bytes())
        flags = vllm_flags(host_bytes, num_bytes, folder, lora_folders(args.model))
    if args.command == "serve --engine vllm":
        _become_vllm(args.model, flags)
    # A shell takes `$(foreword engine-args vllm)` apart at blanks and removes no quotes from it; a
    # person who copies the line from a terminal needs the quotes.
    print(shlex.join(flags) if sys.stdout.isatty() else " ".join(flags))
    return 0


def vllm_flags(
    host_bytes: int, disk_bytes: int, folder: Path | None, lora: Sequence[str]
) -> list[str]:
    """What each is for: docs/guide/engines.md."""
    tier: dict[str, Any] = {"type": "ForewordTier", "module_path": "foreword.plugins.vllm"}
    tier["disk_bytes"] = disk_bytes
    if folder:
        tier["disk_folder"] = str(folder)
    if lora:
        tier["lora_folders"] = list(lora)
    config = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "ForewordCPUSpec",
            "spec_module_path": "foreword.plugins.vllm",
            "cpu_bytes_to_use": host_bytes,
            "eviction_policy": "ForewordPolicy",
            "cache_policy_module_path": "foreword.plugins.vllm",
            "offload_prompt_only": False,
            "self_describing_kv_events": True,
            "secondary_tiers": [tier] if disk_bytes else [],
        },
    }
    return [
        *(TRANSFER, _json(config)),
        *("--prefix-caching-hash-algo", "sha256_cbor"),
        "--enable-prompt-tokens-details",
    ]


def sglang_flags(host_bytes: int | None, disk_bytes: int, folder: Path | None) -> list[str]:
    extra: dict[str, Any] = {
        "backend_name": "foreword",
        "module_path": "foreword.plugins.sglang",
        "class_name": "ForewordStorage",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "disk_bytes": disk_bytes,
    }
    if folder:
        extra["disk_folder"] = str(folder)
    # SGLang counts in whole GB.
    size = ["--hicache-size", str(-(-host_bytes // 10**9))] if host_bytes else []
    return [
        "--enable-cache-report",
        *("--page-size", "64"),  # SGLang's own choice, one token, makes tiny records
        "--enable-hierarchical-cache",
        *size,
        *("--hicache-storage-backend", "dynamic"),
        *("--hicache-storage-backend-extra-config", _json(extra)),
    ]


def _json(value: Any) -> str:
    """JSON that a shell leaves as it is when it comes out of `$(...)`: no blanks, and in texts no
    sign that stands for file names."""
    text = json.dumps(value, separators=(",", ":"))
    return re.sub(
        r'"(?:[^"\\]|\\.)*"',
        lambda found: re.sub(r"[\s*?\[\]]", lambda sign: f"\\u{ord(sign[0]):04x}", found[0]),
        text,
    )


def lora_folders(words: Sequence[str]) -> list[str]:
    """The adapters' paths in vLLM's `--lora-modules NAME=PATH ...`, or JSON with a "path". vLLM's
    hash of a block knows an adapter by name and path, not by its bytes: our tier has to look."""
    folders: list[str] = []
    within = False
    for word in words:
        if word.startswith("--"):
            flag, equals, word = word.partition("=")
            within = flag.replace("_", "-") == "--lora-modules"
            if not equals:
                continue
        if not within or not word:
            continue
        if "=" in word and "," not in word:
            folders.append(word.partition("=")[2])
            continue
        try:
            folders.append(str(json.loads(word)["path"]))
        except (ValueError, TypeError, KeyError) as error:
            raise Failure(f"--lora-modules {word}: neither NAME=PATH nor JSON", "usage") from error
    return folders


def _become_vllm(words: Sequence[str], flags: Sequence[str]) -> None:
    """Flags that the user gives come last, so that vLLM lets them win."""
    if not words or words[0].startswith("-"):
        raise Failure("which model? foreword serve --engine vllm MODEL, then vLLM's flags", "usage")
    named = {word.split("=")[0].split(".")[0].replace("_", "-") for word in words}
    for ours in sorted(named & {"--disk", "--host-bytes"}):
        raise Failure(f"{ours} goes before the model: what follows it is vLLM's", "usage")
    if TRANSFER in named:
        raise Failure(f"{TRANSFER} is set here already: start vllm itself to set it", "usage")
    own = Path(sys.executable).with_name("vllm")
    program = str(own) if own.exists() else shutil.which("vllm")
    if program is None:
        raise Failure("vllm is not installed here: pip install vllm beside foreword", "install")
    sys.stdout.flush()
    os.execv(program, ["vllm", "serve", words[0], *flags, *words[1:]])
