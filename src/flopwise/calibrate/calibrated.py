"""A hardware description with the rates that were timed on the device itself, each with where it comes from."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace

from flopwise.base.units import significant
from flopwise.calibrate.kernel_fit import fit_efficiency
from flopwise.records.calibration import Calibration, CopyWay, FitErrors, Fitted
from flopwise.setup.hardware import CALL_S, LAUNCH_S, Device, Fact, Hardware, Host, Link, Source

PRODUCTS, ATTENTION, STREAMS = "measured-products", "measured-attention", "measured-streams"
COPIES, UPDATE, MACHINE, LIKE = "measured-copies", "measured-update", "measured-machine", "like"
STARTS = "derived-starts"


def calibrate_hardware(
    base: Hardware, calibration: Calibration, *, name: str, date: str, like: bool = False
) -> tuple[Hardware, Fitted]:
    """`base` with what was timed in place of what it said, and how well the constants foretell held-out shapes.

    `like`: the base is another device's, of which the peaks and the caches are borrowed.
    """
    # Plans choose bf16 wherever it has a peak. A CPU gets none, since what surrounds its products is no faster in it.
    formats = {"fp32"} if base.device.kind == "cpu" else set(base.device.peak_flops)
    calibration = _only(calibration, formats)
    device = _device(base, calibration, like=like)
    efficiency, fitted = fit_efficiency(device, base.efficiency, calibration)
    sources = {**base.sources, **_sources(base, calibration, fitted, date)}
    efficiency = replace(
        efficiency, source=STREAMS, gemm=replace(efficiency.gemm, source=PRODUCTS, activates=_activates(calibration))
    )
    if calibration.streams:
        efficiency = replace(efficiency, memory=replace(efficiency.memory, source=STREAMS))
    if calibration.attentions:
        efficiency = replace(efficiency, attention=replace(efficiency.attention, source=ATTENTION))
    title = calibration.device_name if like else base.title.removesuffix(", measured")
    hardware = replace(
        base,
        name=name,
        title=f"{title}, measured",
        aliases=(),
        device=device,
        efficiency=efficiency,
        link=_link(base, calibration),
        host=_host(base, calibration),
        sources=sources,
    )
    cited = {key for _, key in hardware.list_sources()}
    return replace(hardware, sources={key: source for key, source in sources.items() if key in cited}), fitted


def _activates(calibration: Calibration) -> bool:
    """quack-kernels' products come with those that have SwiGLU in them."""
    return calibration.versions.get("products") == "quack"


def _only(calibration: Calibration, formats: set[str]) -> Calibration:
    """Without the products of formats that have no peak to be a share of."""
    return replace(calibration, products=tuple(row for row in calibration.products if row.number_format in formats))


def _device(base: Hardware, calibration: Calibration, *, like: bool) -> Device:
    device = base.device
    units = Fact(value=float(calibration.units), source=MACHINE)
    dram = replace(device.dram, size_bytes=Fact(value=float(calibration.memory_bytes), source=MACHINE))
    if device.kind == "cpu":
        # The best product is the peak, as a frequency times a width says little about a shared machine.
        best = max((row.flops_per_s for row in calibration.products), default=0.0)
        peaks = dict(device.peak_flops)
        if best > peaks["fp32"].value:
            peaks["fp32"] = _fact(best, PRODUCTS)
        return replace(device, peak_flops=peaks, units=units, memory=(*device.memory[:-1], dram))
    if not like:
        return replace(device, units=units, memory=(*device.memory[:-1], dram))
    borrowed = {name: replace(fact, source=LIKE) for name, fact in device.peak_flops.items()}
    return replace(device, peak_flops=borrowed, units=units, power_w=None, memory=(*device.memory[:-1], dram))


def copy_rates(calibration: Calibration) -> dict[CopyWay, float]:
    """Bytes a second over the link, each way, alone and beside the other."""
    return {row.way: row.bytes_per_s for row in calibration.copies}


def _link(base: Hardware, calibration: Calibration) -> Link | None:
    rates = copy_rates(calibration)
    if not rates:
        return base.link
    alone = min(rates["to_device"], rates["to_host"])
    beside = min(rates["to_device_beside"], rates["to_host_beside"])
    return Link(
        name=base.link.name if base.link else "link to the host",
        bandwidth_bytes_per_s=_fact(alone, COPIES),
        both_ways_bytes_per_s=_fact(min(beside, alone), COPIES),
    )


def _host(base: Hardware, calibration: Calibration) -> Host | None:
    if calibration.device == "cpu":
        return base.host
    host = base.host or Host()
    update = calibration.update_bytes_per_s
    return replace(
        host,
        memory_bytes=Fact(value=float(calibration.host_memory_bytes), source=MACHINE),
        cores=Fact(value=float(calibration.host_cores), source=MACHINE),
        update_bytes_per_s=host.update_bytes_per_s if update is None else _fact(update, UPDATE),
        launch_s=_fact(calibration.host_launch_s, STREAMS),
        call_s=_fact(calibration.host_launch_s * CALL_S / LAUNCH_S, STARTS),
    )


def _fact(value: float, source: str) -> Fact:
    return Fact(value=float(f"{value:.4g}"), source=source)


# -- where it comes from ---------------------------------------------------------------------------------------------


def _sources(base: Hardware, calibration: Calibration, fitted: Fitted, date: str) -> dict[str, Source]:
    circumstances = f"{date}, {_versions(calibration)}{sensors_text(calibration)}"

    def source(title: str, note: str) -> Source:
        return Source(title=f"{title} timed on {calibration.device_name}", kind="measured", note=note)

    formats: dict[str, int] = {}
    for row in calibration.products:
        formats[row.number_format] = formats.get(row.number_format, 0) + 1
    counts = ", ".join(f"{count} in {name}" for name, count in formats.items())
    left_out = "".join(f"; {note}" for note in calibration.notes)
    rates = {way.replace("_", " "): f"{rate / 1e9:.1f} GB/s" for way, rate in copy_rates(calibration).items()}
    return {
        PRODUCTS: source(
            "Matrix products",
            f"`flopwise calibrate`, {circumstances}; {len(calibration.products)} products, {counts}, warm; "
            f"{errors_text(fitted.products)}{_describe_sustained(calibration)}{left_out}",
        ),
        ATTENTION: source(
            "Attention",
            f"`flopwise calibrate`, {circumstances}; {len(calibration.attentions)} causal calls forward and backward, "
            f"warm; {errors_text(fitted.attention)}",
        ),
        STREAMS: source(
            "Streams and launches",
            f"`flopwise calibrate`, {circumstances}; {len(calibration.streams)} copies and sums, warm; "
            f"{errors_text(fitted.streams)}; launch_s is the shortest kernel among queued ones, of which the host "
            f"submits one in {calibration.host_launch_s * 1e6:.1f} µs",
        ),
        STARTS: Source(
            title=f"Kernels that a program in Python starts on {calibration.device_name}",
            kind="derived",
            note=f"{CALL_S / LAUNCH_S:g} times launch_s, as on the host of an H200",
        ),
        COPIES: source(
            "Pinned copies",
            f"`flopwise calibrate`, {circumstances}; " + ", ".join(f"{way} {rate}" for way, rate in rates.items()),
        ),
        UPDATE: source(
            "AdamW on the host's cores",
            f"`flopwise calibrate`, {circumstances}; torch's fused kernel in fp32, 28 bytes a parameter, on "
            f"{calibration.host_cores} cores while copies ran both ways",
        ),
        MACHINE: Source(title="What the driver and the operating system report", kind="measured", note=date),
        LIKE: Source(
            title=f"Peaks of {base.title}",
            kind="estimated",
            note=f"borrowed for {calibration.device_name}, whose own are not in the catalogue; shares of them are "
            "measured, so that times hold, but not utilisations",
        ),
    }


def _versions(calibration: Calibration) -> str:
    return ", ".join(f"{name} {version}" for name, version in calibration.versions.items())


def sensors_text(calibration: Calibration) -> str:
    """Clock and power in the median over the rows, as words after a comma; nothing where no sensor was read."""
    words = []
    clock = median_of(sample.clock_hz for sample in calibration.samples)
    power = median_of(sample.power_w for sample in calibration.samples)
    if clock is not None:
        words.append(f"{clock / 1e6:.0f} MHz")
    if power is not None:
        limit = calibration.power_limit_w
        words.append(f"{power:.0f} W" + (f" of {limit:.0f} W" if limit else ""))
    return f", {' and '.join(words)} in the median" if words else ""


def _describe_sustained(calibration: Calibration) -> str:
    rate = calibration.kept_up_flops_per_s
    return "" if rate is None else f"; one of 8192 a side kept up {rate / 1e12:.0f} TFLOP/s"


def median_of(values: Iterable[float | None]) -> float | None:
    """The median of those that are known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def errors_text(errors: FitErrors | None) -> str:
    """How far held-out rows lay from what was foretold for them."""
    if errors is None:
        return "too few shapes to hold any out"
    median, largest = (significant(100 * error, 2) for error in (errors.median, errors.largest))
    return f"shapes that were held out: error {median} % in the median, {largest} % at most, of {errors.rows}"
