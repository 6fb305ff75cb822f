"""A plan's figures that need no traffic: what a token's KV takes, how many each tier holds, and
when loading beats computing. Each figure carries its formula and what went into it.

Rates are those of data sheets: `mfu` says which part of the peak a prefill reaches.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from foreword.core.cost import StepCost, TierCost, num_pairs
from foreword.sim.catalogue import Hardware
from foreword.sim.model import DTYPE_BYTES, ModelShape

CONVERSATION_TOKENS = 4096  # "how many chats is that": of this many tokens each
PROMPT_LENGTHS = (1_000, 4_000, 10_000, 32_768, 131_072)


Row = dict[str, float | str | None]


class PlanError(Exception):
    """What cannot be planned. The message is for the user."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number. `inputs` has every name that the formula uses."""

    name: str
    value: float
    unit: str
    formula: str
    inputs: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows by column; `formulas` says of the columns how they came about."""

    name: str
    rows: Sequence[Row]
    formulas: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PlannedTier:
    """A tier below the device. 0 bytes: nobody said how large it is."""

    name: str
    num_bytes: float
    cost: TierCost
    per_gb: float | None = None  # the price of 10^9 bytes


@dataclass(frozen=True, slots=True)
class Deployment:
    """One model on one machine: as many replicas as it holds, each on `devices_per_replica`
    devices, whose prefill is taken to be as many times quicker."""

    model: ModelShape
    hardware: Hardware
    weights_bytes: float
    kv_number_bytes: float
    mfu: float
    devices_per_replica: int
    tiers: tuple[PlannedTier, ...] = ()
    learnt: StepCost | None = None  # by an engine of its own steps, in place of the rated one

    @property
    def num_replicas(self) -> int:
        """Of this machine."""
        return self.hardware.num_devices // self.devices_per_replica

    @property
    def kv_bytes(self) -> float:
        """Of one token, held once."""
        return self.model.kv_numbers * self.kv_number_bytes

    @property
    def copies(self) -> float:
        """How often the devices of a replica together hold a token's KV: a KV head lies on one of
        them at least, MLA's latent on all."""
        return max(1.0, self.devices_per_replica / self.model.num_kv_heads)

    @property
    def kv_room_bytes(self) -> float:
        """Of a replica's devices."""
        return self.devices_per_replica * self.hardware.hbm_bytes - self.weights_bytes

    @property
    def device_tokens(self) -> float:
        """Of one replica."""
        return self.kv_room_bytes / (self.kv_bytes * self.copies)

    @property
    def flops_per_s(self) -> float:
        """That a replica's prefill gets."""
        return self.devices_per_replica * self.hardware.flops_per_s * self.mfu

    @property
    def step(self) -> StepCost:
        """What a replica's prefill costs."""
        return self.learnt or self.model.step_cost(self.flops_per_s)

    def load_s(self, tier: PlannedTier, num_tokens: int) -> float:
        """Seconds until the KV of so many tokens is on the device."""
        return tier.cost.load_s(round(num_tokens * self.kv_bytes))

    def rated_tiers(self) -> tuple[PlannedTier, ...]:
        """The machine's own, all devices of a replica loading at once. Each copy of the KV passes a
        device's link; a disk is read once for all of them."""
        hardware, devices = self.hardware, self.devices_per_replica
        links = devices / self.copies
        rates = {
            "host": links * hardware.host_bytes_per_s,
            "disk": min(devices * hardware.disk_bytes_per_s, links * hardware.host_bytes_per_s),
            "network": links * hardware.network_bytes_per_s,
        }
        sizes = {"host": hardware.machine_host_bytes, "disk": hardware.machine_disk_bytes}
        return tuple(
            PlannedTier(name, sizes.get(name, 0), TierCost(0.0, rate))
            for name, rate in rates.items()
            if rate
        )


def deployment(
    model: ModelShape,
    hardware: Hardware,
    *,
    weights_dtype: str | None = None,
    kv_dtype: str = "bfloat16",
    mfu: float = 1.0,
    devices_per_replica: int | None = None,
    tiers: Sequence[PlannedTier] = (),
) -> Deployment:
    """A replica takes the fewest devices (a power of two) whose memory holds the weights and a
    tenth more, unless told. Without `tiers`, those of the hardware's data sheet. Raises PlanError
    where the weights do not fit, ShapeError where their size is not known."""
    names = ["device", *(tier.name for tier in tiers)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise PlanError(f"two tiers are called {twice}: name them apart")
    weights_bytes = model.weights_bytes(weights_dtype)
    devices = devices_per_replica or 1
    if devices_per_replica is None:
        while devices * hardware.hbm_bytes < 1.1 * weights_bytes:
            devices *= 2
    if devices > hardware.num_devices or devices * hardware.hbm_bytes <= weights_bytes:
        raise PlanError(
            f"the weights of {model.name} take {weights_bytes / 1e9:,.0f} GB, and "
            f"{hardware.num_devices} × {hardware.name} have "
            f"{hardware.num_devices * hardware.hbm_bytes / 1e9:,.0f}, in {devices} for a replica: "
            f"more devices (--hardware {hardware.name}:N), or smaller weights (--weights-dtype)"
        )
    site = Deployment(model, hardware, weights_bytes, DTYPE_BYTES[kv_dtype], mfu, devices)
    return replace(site, tiers=tuple(tiers) or site.rated_tiers())


def figures(site: Deployment) -> list[Figure]:
    """Of the model and the machine alone."""
    model, hardware = site.model, site.hardware
    per_token_s = site.step.per_token_s
    found = [
        _kv_bytes_figure(site),
        Figure(
            "weights",
            site.weights_bytes,
            "B",
            "parameters × bytes of one",
            {"parameters": model.num_params, "bytes of one": site.weights_bytes / model.num_params},
        ),
        Figure(
            "room for KV in a replica",
            site.kv_room_bytes,
            "B",
            "devices × memory of one - weights",
            {
                "devices": site.devices_per_replica,
                "memory of one": hardware.hbm_bytes,
                "weights": site.weights_bytes,
            },
        ),
        _prefill_figure(site),
        Figure(
            "break-even bandwidth",
            site.kv_bytes / per_token_s,
            "B/s",
            "KV of a token ÷ prefill per token",
            {"KV of a token": site.kv_bytes, "prefill per token": per_token_s},
        ),
    ]
    lengths = [length for length in (8192, 32_768) if length <= model.context]
    return found + [_attention_share(site, length) for length in lengths]


def _kv_bytes_figure(site: Deployment) -> Figure:
    model = site.model
    if model.latent_size:
        formula = "layers × latent × bytes of a number"
        inputs: dict[str, float] = {"layers": model.num_layers, "latent": model.latent_size}
    else:
        formula = "layers × KV heads × (key + value) × bytes of a number"
        inputs = {
            "layers": model.num_layers,
            "KV heads": model.num_kv_heads,
            "key": model.head_size,
            "value": model.values,
        }
    inputs["bytes of a number"] = site.kv_number_bytes
    return Figure("KV of a token", site.kv_bytes, "B", formula, inputs)


def _prefill_figure(site: Deployment) -> Figure:
    model, per_token_s = site.model, site.step.per_token_s
    if site.learnt:
        return Figure("prefill per token", per_token_s, "s", "learnt", {"learnt": per_token_s})
    return Figure(
        "prefill per token",
        per_token_s,
        "s",
        "(2 × active parameters + windowed attention) ÷ (devices × peak × mfu)",
        {
            "active parameters": model.num_active_params,
            "windowed attention": model.num_window_layers * model.window * model.flops_per_pair,
            "devices": site.devices_per_replica,
            "peak": site.hardware.flops_per_s,
            "mfu": site.mfu,
        },
    )


def _attention_share(site: Deployment, num_tokens: int) -> Figure:
    step = site.step
    return Figure(
        f"attention over the rest, {num_tokens:,} tokens",
        num_pairs(num_tokens, 0) * step.per_pair_s / (num_tokens * step.per_token_s),
        "share",
        "pairs × seconds of a pair ÷ (tokens × prefill per token)",
        {
            "pairs": num_pairs(num_tokens, 0),
            "seconds of a pair": step.per_pair_s,
            "tokens": num_tokens,
            "prefill per token": step.per_token_s,
        },
    )


def tier_table(site: Deployment) -> Table:
    """What each tier holds and how fast a token comes from it. The device's row is of a replica,
    the others are of the machine."""
    per_token_s = site.step.per_token_s
    rows: list[Row] = [
        {
            "tier": "device",
            "bytes": site.kv_room_bytes,
            "tokens": site.device_tokens,
            "conversations": site.device_tokens / CONVERSATION_TOKENS,
            "us_per_token": 0.0,
            "times_quicker": None,
        }
    ]
    if site.num_replicas > 1:
        rows.append(
            {
                "tier": f"device of {site.num_replicas} replicas",
                "bytes": site.num_replicas * site.kv_room_bytes,
                "tokens": site.num_replicas * site.device_tokens,
                "conversations": site.num_replicas * site.device_tokens / CONVERSATION_TOKENS,
                "us_per_token": 0.0,
                "times_quicker": None,
            }
        )
    for tier in site.tiers:
        tokens = tier.num_bytes / site.kv_bytes if tier.num_bytes else None
        load_s = site.kv_bytes * tier.cost.shared_by / tier.cost.bytes_per_s
        rows.append(
            {
                "tier": tier.name,
                "bytes": tier.num_bytes or None,
                "tokens": tokens,
                "conversations": tokens and tokens / CONVERSATION_TOKENS,
                "us_per_token": load_s * 1e6,
                "times_quicker": per_token_s / load_s,
            }
        )
    return Table(
        "tiers",
        rows,
        {
            "tokens": "bytes ÷ KV of a token; on the device ÷ how often it holds each (copies)",
            "conversations": f"tokens ÷ {CONVERSATION_TOKENS:,}",
            "us_per_token": "KV of a token × shared_by ÷ bandwidth",
            "times_quicker": "prefill per token ÷ load of a token, without attention and latency",
        },
    )


def load_table(site: Deployment, lengths: Sequence[int] = PROMPT_LENGTHS) -> Table:
    """For each prompt length and tier: load, or compute again?"""
    rows: list[Row] = []
    for length in lengths:
        if length > site.model.context:
            continue
        recompute_s = site.step.prefill_s(length)
        for tier in site.tiers:
            load_s = site.load_s(tier, length)
            rows.append(
                {
                    "prompt_tokens": length,
                    "tier": tier.name,
                    "bytes": length * site.kv_bytes,
                    "load_s": load_s,
                    "recompute_s": recompute_s,
                    "break_even_bytes_per_s": length * site.kv_bytes / recompute_s,
                    "cheaper": "load" if load_s < recompute_s else "recompute",
                }
            )
    return Table(
        "load or recompute",
        rows,
        {
            "load_s": "latency + bytes × shared_by ÷ bandwidth",
            "recompute_s": "tokens × prefill per token + pairs × seconds of a pair"
            + (" + seconds of a step" if site.learnt else ""),
            "break_even_bytes_per_s": "bytes ÷ recompute_s",
        },
    )


@dataclass(slots=True)
class Plan:
    """All that is said of a deployment. `notes`: what whoever reads the figures should know."""

    site: Deployment
    figures: list[Figure]
    tables: list[Table]
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        site = self.site
        return {
            "model": {**asdict(site.model), "attention": site.model.attention},
            "hardware": asdict(site.hardware),
            "replicas_of_the_machine": site.num_replicas,
            "devices_per_replica": site.devices_per_replica,
            "mfu": site.mfu,
            "notes": self.notes,
            "figures": {
                figure.name: {
                    "value": figure.value,
                    "unit": figure.unit,
                    "formula": figure.formula,
                    "inputs": dict(figure.inputs),
                }
                for figure in self.figures
            },
            "tables": {
                table.name: {"rows": list(table.rows), "formulas": dict(table.formulas)}
                for table in self.tables
            },
        }


def plan_of(site: Deployment) -> Plan:
    """Of the model and the machine alone."""
    return Plan(site, figures(site), [tier_table(site), load_table(site)], list(_notes(site)))


def _notes(site: Deployment) -> Iterator[str]:
    model = site.model
    if model.num_window_layers:
        kept = model.kv_numbers // model.num_layers * site.kv_number_bytes
        yield (
            f"{model.num_window_layers} of {model.num_layers} layers attend to the last "
            f"{model.window:,} tokens only. The KV of a token has all layers, since whoever "
            "resumes at it needs them; an engine that drops what has left the window holds "
            f"{(model.num_layers - model.num_window_layers) * kept:,.0f} bytes of a token for long"
        )
    if site.copies > 1:
        yield (
            f"{site.devices_per_replica} devices of a replica hold each token's KV "
            f"{site.copies:g} times, as tensor parallelism does; what splits requests among them "
            "instead holds it once"
        )
    if site.learnt:
        yield "prefill costs what the engine of the log learnt, whatever the hardware's peak is"
    elif site.hardware.name != "here":
        peak = "at" if site.mfu == 1 else f"at {site.mfu:g} of"
        yield (
            f"prefill {peak} the 16-bit peak of the data sheet: real ones reach a part of it "
            "(--mfu 0.4), which speaks for loading; small transfers pay for each, which speaks "
            "for computing"
        )
