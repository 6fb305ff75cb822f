"""Models and hardware by name, as plain numbers with where they are from.

Models: the config.json and the model card that their makers publish on the Hugging Face hub, under
the name in the last column. Parameters are those of the card; `active` is what one token passes
through. Hardware: the makers' data sheets, dense 16-bit peaks, nothing measured.
"""

from dataclasses import dataclass, replace

from foreword.sim.model import ModelShape

GB = 10**9
# One PCIe Gen5 x16 and one Gen4 x16 link, each direction; one NVMe SSD of that generation, rated
# sequential read.
_GEN5, _GEN4 = 64 * GB, 32 * GB
_GEN5_SSD, _GEN4_SSD = 14 * GB, 7 * GB


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine of `num_devices` devices. Figures without "machine" are of one device; the bytes of
    host and disk are 0 where the hardware does not say them."""

    name: str
    flops_per_s: float  # 16-bit, dense
    hbm_bytes: int
    hbm_bytes_per_s: float
    host_bytes_per_s: float  # host memory to device
    disk_bytes_per_s: float  # one SSD for each device
    network_bytes_per_s: float
    num_devices: int = 1
    machine_host_bytes: int = 0
    machine_disk_bytes: int = 0
    source: str = ""


def hardware_named(name: str) -> Hardware:
    """`h100`, or `h100:8` for eight of them in a machine. Raises KeyError, ValueError."""
    word, colon, number = name.lower().partition(":")
    found = HARDWARE[word]
    if not colon:
        return found
    num_devices = int(number)
    if not 1 <= num_devices <= 1024:
        raise ValueError(f"{number} devices")
    return replace(found, num_devices=num_devices)


_H100 = Hardware(
    "h100",
    989e12,
    80 * GB,
    3.35e12,
    _GEN5,
    _GEN5_SSD,
    50 * GB,
    source="NVIDIA H100 SXM5 data sheet; one ConnectX-7 of 400 Gb/s for each GPU",
)
HARDWARE = {
    hardware.name: hardware
    for hardware in (
        _H100,
        replace(
            _H100,
            name="dgx-h100",
            num_devices=8,
            machine_host_bytes=2000 * GB,
            machine_disk_bytes=30_000 * GB,
            source="NVIDIA DGX H100 data sheet: 2 TB of memory, 8 SSDs of 3.84 TB, 8 × 400 Gb/s. "
            "It rates no SSD: one of PCIe Gen5 for each GPU is taken",
        ),
        replace(
            _H100,
            name="h200",
            hbm_bytes=141 * GB,
            hbm_bytes_per_s=4.8e12,
            source="NVIDIA H200 SXM data sheet",
        ),
        Hardware(
            "a100-80",
            312e12,
            80 * GB,
            2.039e12,
            _GEN4,
            _GEN4_SSD,
            25 * GB,
            source="NVIDIA A100 80GB SXM data sheet; one ConnectX-6 of 200 Gb/s for each GPU",
        ),
        Hardware(
            "mi300x",
            1307.4e12,
            192 * GB,
            5.3e12,
            _GEN5,
            _GEN5_SSD,
            50 * GB,
            source="AMD Instinct MI300X data sheet; one port of 400 Gb/s for each GPU",
        ),
        Hardware(
            "l40s",
            362.05e12,
            48 * GB,
            864e9,
            _GEN4,
            _GEN4_SSD,
            25 * GB,
            source="NVIDIA L40S data sheet; one port of 200 Gb/s for each GPU",
        ),
    )
}

B = 10**9
# layers, query heads, KV heads, head size, parameters, active parameters, context
_Row = tuple[int, int, int, int, float, float, int]
_PLAIN: dict[str, tuple[_Row, str]] = {
    "llama-3.1-8b": ((32, 32, 8, 128, 8.03, 8.03, 131072), "meta-llama/Llama-3.1-8B"),
    "llama-3.1-70b": ((80, 64, 8, 128, 70.55, 70.55, 131072), "meta-llama/Llama-3.1-70B"),
    "llama-3.1-405b": ((126, 128, 8, 128, 405.85, 405.85, 131072), "meta-llama/Llama-3.1-405B"),
    "llama-3.2-1b": ((16, 32, 8, 64, 1.236, 1.236, 131072), "meta-llama/Llama-3.2-1B"),
    "llama-3.2-3b": ((28, 24, 8, 128, 3.213, 3.213, 131072), "meta-llama/Llama-3.2-3B"),
    "llama-3.3-70b": ((80, 64, 8, 128, 70.55, 70.55, 131072), "meta-llama/Llama-3.3-70B-Instruct"),
    "qwen2.5-0.5b": ((24, 14, 2, 64, 0.494, 0.494, 32768), "Qwen/Qwen2.5-0.5B-Instruct"),
    "qwen2.5-1.5b": ((28, 12, 2, 128, 1.544, 1.544, 32768), "Qwen/Qwen2.5-1.5B-Instruct"),
    "qwen2.5-3b": ((36, 16, 2, 128, 3.086, 3.086, 32768), "Qwen/Qwen2.5-3B-Instruct"),
    "qwen2.5-7b": ((28, 28, 4, 128, 7.616, 7.616, 32768), "Qwen/Qwen2.5-7B-Instruct"),
    "qwen2.5-14b": ((48, 40, 8, 128, 14.77, 14.77, 32768), "Qwen/Qwen2.5-14B-Instruct"),
    "qwen2.5-32b": ((64, 40, 8, 128, 32.76, 32.76, 32768), "Qwen/Qwen2.5-32B-Instruct"),
    "qwen2.5-72b": ((80, 64, 8, 128, 72.71, 72.71, 32768), "Qwen/Qwen2.5-72B-Instruct"),
    "qwen3-0.6b": ((28, 16, 8, 128, 0.596, 0.596, 40960), "Qwen/Qwen3-0.6B"),
    "qwen3-1.7b": ((28, 16, 8, 128, 1.721, 1.721, 40960), "Qwen/Qwen3-1.7B"),
    "qwen3-4b": ((36, 32, 8, 128, 4.022, 4.022, 40960), "Qwen/Qwen3-4B"),
    "qwen3-8b": ((36, 32, 8, 128, 8.191, 8.191, 40960), "Qwen/Qwen3-8B"),
    "qwen3-14b": ((40, 40, 8, 128, 14.77, 14.77, 40960), "Qwen/Qwen3-14B"),
    "qwen3-32b": ((64, 64, 8, 128, 32.76, 32.76, 40960), "Qwen/Qwen3-32B"),
    "qwen3-30b-a3b": ((48, 32, 4, 128, 30.53, 3.35, 40960), "Qwen/Qwen3-30B-A3B"),
    "qwen3-235b-a22b": ((94, 64, 4, 128, 235.1, 22.2, 40960), "Qwen/Qwen3-235B-A22B"),
    "mistral-7b": ((32, 32, 8, 128, 7.248, 7.248, 32768), "mistralai/Mistral-7B-Instruct-v0.3"),
    "mistral-nemo-12b": (
        (40, 32, 8, 128, 12.25, 12.25, 131072),
        "mistralai/Mistral-Nemo-Base-2407",
    ),
    "mistral-small-24b": (
        (40, 32, 8, 128, 23.57, 23.57, 32768),
        "mistralai/Mistral-Small-24B-Instruct-2501",
    ),
    "mistral-large-123b": (
        (88, 96, 8, 128, 122.6, 122.6, 131072),
        "mistralai/Mistral-Large-Instruct-2407",
    ),
    "mixtral-8x7b": ((32, 32, 8, 128, 46.70, 12.88, 32768), "mistralai/Mixtral-8x7B-v0.1"),
    "mixtral-8x22b": ((56, 48, 8, 128, 140.6, 39.15, 65536), "mistralai/Mixtral-8x22B-v0.1"),
    "phi-3-mini": ((32, 32, 32, 96, 3.821, 3.821, 131072), "microsoft/Phi-3-mini-128k-instruct"),
    "phi-3-medium": (
        (40, 40, 10, 128, 13.96, 13.96, 131072),
        "microsoft/Phi-3-medium-128k-instruct",
    ),
    "phi-4-mini": ((32, 24, 8, 128, 3.836, 3.836, 131072), "microsoft/Phi-4-mini-instruct"),
    "phi-4": ((40, 40, 10, 128, 14.66, 14.66, 16384), "microsoft/phi-4"),
    "smollm2-135m": ((30, 9, 3, 64, 0.1345, 0.1345, 8192), "HuggingFaceTB/SmolLM2-135M"),
    "smollm2-360m": ((32, 15, 5, 64, 0.3618, 0.3618, 8192), "HuggingFaceTB/SmolLM2-360M"),
    "smollm2-1.7b": ((24, 32, 32, 64, 1.711, 1.711, 8192), "HuggingFaceTB/SmolLM2-1.7B"),
}
# The same, then the window and how many of the layers have it.
_WINDOWED: dict[str, tuple[_Row, int, int, str]] = {
    "gemma-2-2b": ((26, 8, 4, 256, 2.614, 2.614, 8192), 4096, 13, "google/gemma-2-2b"),
    "gemma-2-9b": ((42, 16, 8, 256, 9.242, 9.242, 8192), 4096, 21, "google/gemma-2-9b"),
    "gemma-2-27b": ((46, 32, 16, 128, 27.23, 27.23, 8192), 4096, 23, "google/gemma-2-27b"),
    "gemma-3-1b": ((26, 4, 1, 256, 1.000, 1.000, 32768), 512, 22, "google/gemma-3-1b-pt"),
    "gemma-3-4b": ((34, 8, 4, 256, 3.880, 3.880, 131072), 1024, 29, "google/gemma-3-4b-pt"),
    "gemma-3-12b": ((48, 16, 8, 256, 11.77, 11.77, 131072), 1024, 40, "google/gemma-3-12b-pt"),
    "gemma-3-27b": ((62, 32, 16, 128, 27.01, 27.01, 131072), 1024, 52, "google/gemma-3-27b-pt"),
    "gpt-oss-20b": ((24, 64, 8, 64, 20.91, 3.61, 131072), 128, 12, "openai/gpt-oss-20b"),
    "gpt-oss-120b": ((36, 64, 8, 64, 116.83, 5.13, 131072), 128, 18, "openai/gpt-oss-120b"),
}
# Layers, heads, parameters, active parameters, context. All have 512 numbers of a latent and 64 of
# RoPE, keys of 128 + 64 and values of 128.
_LATENT: dict[str, tuple[tuple[int, int, float, float, int], str]] = {
    "deepseek-v2-lite": ((27, 16, 15.71, 2.66, 163840), "deepseek-ai/DeepSeek-V2-Lite"),
    "deepseek-v2": ((60, 128, 235.7, 21.4, 163840), "deepseek-ai/DeepSeek-V2"),
    "deepseek-v3": ((61, 128, 671.0, 37.0, 163840), "deepseek-ai/DeepSeek-V3"),
    "deepseek-r1": ((61, 128, 671.0, 37.0, 163840), "deepseek-ai/DeepSeek-R1"),
    "kimi-k2": ((61, 64, 1026.0, 32.0, 131072), "moonshotai/Kimi-K2-Instruct"),
}
_PUBLISHED_IN = {
    **dict.fromkeys(("deepseek-v3", "deepseek-r1", "kimi-k2"), "fp8"),
    **dict.fromkeys(("gpt-oss-20b", "gpt-oss-120b"), "mxfp4"),
}


def _plain(name: str, row: _Row, source: str) -> ModelShape:
    layers, heads, kv_heads, head_size, params, active, context = row
    return ModelShape(
        name,
        layers,
        heads,
        kv_heads,
        head_size,
        round(params * B),
        round(active * B),
        context,
        weights_dtype=_PUBLISHED_IN.get(name, "bfloat16"),
        source=f"{source} on the Hugging Face hub",
    )


def _latent(name: str, row: tuple[int, int, float, float, int], source: str) -> ModelShape:
    layers, heads, params, active, context = row
    plain = _plain(name, (layers, heads, 1, 192, params, active, context), source)
    return replace(plain, latent_size=576, value_size=128)


MODELS = {
    **{name: _plain(name, row, source) for name, (row, source) in _PLAIN.items()},
    **{
        name: replace(_plain(name, row, source), window=window, num_window_layers=layers)
        for name, (row, window, layers, source) in _WINDOWED.items()
    },
    **{name: _latent(name, row, source) for name, (row, source) in _LATENT.items()},
}
