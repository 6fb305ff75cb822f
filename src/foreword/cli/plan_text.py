"""A plan as text: figures by line, tables in columns, with `explain` the formula of each."""

from collections.abc import Iterator

from foreword.sim.plan import Figure, Plan, Table

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
# A column's unit by the end of its name.
_UNITS = {"bytes_per_s": "B/s", "bytes": "B", "share": "share", "s": "s"}


def page(plan: Plan, *, explain: bool = False) -> Iterator[str]:
    """Line by line."""
    yield from _heading(plan)
    yield ""
    width = max(len(figure.name) for figure in plan.figures) + 2
    for figure in plan.figures:
        yield f"{figure.name:{width}}{shown(figure.value, figure.unit)}"
        if explain:
            yield f"    = {_explained(figure)}"
    for table in plan.tables:
        yield ""
        yield table.name
        yield from _columns(table)
        if explain:
            yield from (f"    {name} = {formula}" for name, formula in table.formulas.items())
    for note in plan.notes:
        yield ""
        yield f"Note: {note}."


def _heading(plan: Plan) -> Iterator[str]:
    site, model, hardware = plan.site, plan.site.model, plan.site.hardware
    if model.latent_size:
        heads = f"latents of {model.latent_size} numbers"
    else:
        heads = f"{model.num_kv_heads} KV heads of {model.head_size}"
    active = ""
    if model.num_active_params != model.num_params:
        active = f", {model.num_active_params / 1e9:.4g} active"
    yield (
        f"{model.name}: {model.attention}, {model.num_layers} layers, {heads}, "
        f"{model.num_params / 1e9:.4g} billion parameters{active}, context {model.context:,}"
    )
    yield (
        f"{hardware.name}: {hardware.num_devices} × {shown(hardware.flops_per_s, 'FLOP/s')}, "
        f"{shown(hardware.hbm_bytes, 'B')} at {shown(hardware.hbm_bytes_per_s, 'B/s')}; replicas "
        f"of {site.devices_per_replica}: {site.num_replicas}"
    )
    yield f"  {model.source}; {hardware.source}"


def _explained(figure: Figure) -> str:
    inputs = ", ".join(f"{name} {_plain(value)}" for name, value in figure.inputs.items())
    return f"{figure.formula}: {inputs}"


def _columns(table: Table) -> Iterator[str]:
    names = [name for name in table.rows[0] if any(row[name] is not None for row in table.rows)]
    cells = [[_split(name)[0] for name in names]]
    cells += [[_cell(row[name], _split(name)[1]) for name in names] for row in table.rows]
    widths = [max(len(line[at]) for line in cells) for at in range(len(names))]
    words = [isinstance(table.rows[0][name], str) for name in names]
    for line in cells:
        parts = [
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(line, widths, words, strict=True)
        ]
        yield ("  " + "  ".join(parts)).rstrip()


def _split(name: str) -> tuple[str, str]:
    """A column's heading and its unit."""
    for end, unit in _UNITS.items():
        if name == end or name.endswith("_" + end):
            return name.removesuffix(end).strip("_").replace("_", " ") or "size", unit
    return name.replace("_", " "), ""


def _cell(value: float | str | None, unit: str) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else shown(value, unit)


def shown(value: float, unit: str) -> str:
    """`64.0 GB`, `16.2 µs`, `36.6 %`; three digits that count."""
    if not value:
        return "0"
    if unit == "share":
        return f"{100 * value:.1f} %"
    if unit == "s":
        scale = next((one for one in _SECONDS if value >= one[0]), (1.0, "s"))
        return f"{_digits(value / scale[0])} {scale[1]}"
    if unit == "B" and value < 1e6:
        return f"{value:,.0f} B ({value / 1024:.4g} KiB)"
    factor, prefix = next((one for one in _PREFIXES if unit and value >= one[0]), (1.0, ""))
    return f"{_digits(value / factor)} {prefix}{unit}".rstrip()


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and value < 1e15 else f"{value:.6g}"
