"""Write the results of inference as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pipeline.errors import count
from pipeline.tools.inference.inference_file import Form, Inference, Measured, Throughput


def markdown(found: Inference) -> str:
    """Return the content of ``inference/<variant>.md``."""
    lines = [f"# Inference with {found.variant}", ""]
    devices = dict.fromkeys((form.device_type, form.device) for form in found.forms)
    for device_type, name in devices:
        here = [form for form in found.forms if form.device_type == device_type]
        lines += _device(found, here, f"{device_type.upper()}: {name}")
    lines += [
        "## How to read it",
        "",
        f"- All forms are made from the model of seed {found.seed}. A form takes inputs as they are in the prepared "
        "data set, and returns float32 outputs.",
        f"- The forms were measured in {count(found.rounds, 'round')}, with {count(found.threads, 'CPU thread')}. In "
        "each round, the forms took turns, after a warm-up. Each measured time ends when the device has finished.",
        "- A throughput is the median over the rounds; the slowest and the fastest round are in brackets. A ratio is "
        "the median of the rounds' ratios to the plain form; its 95% interval is in brackets.",
        "- *p50*, *p99*: the median and the 99th percentile of the milliseconds from a call with one sample to its "
        "outputs. The smallest and the largest of the rounds' medians follow p50 in brackets. p99 is unknown if there "
        "were too few calls.",
        "- *Equal*: the score against the plain form's predictions; for classes, the share of samples with the same "
        "class.",
        "- *Outputs*: the largest difference from the outputs of the plain form.",
        "- *Prepared*: seconds to make the form and to call it once with each batch size. No other figure includes "
        "this time.",
        "- *Size*: bytes of the parameters, buffers and constants; for a saved program, also the bytes of its file.",
        "",
    ]
    return "\n".join(lines)


def _device(found: Inference, forms: list[Form], heading: str) -> list[str]:
    measured = [(form, form.measured) for form in forms if form.measured]
    lines = [f"## {heading}", ""]
    if measured:
        sizes = [each.batch_size for each in measured[0][1].throughput]
        heads = ["form", "p50 (ms)", "p99 (ms)", "correct", "equal", "outputs", "size", "prepared (s)"]
        lines += _table(heads, (_cells(form, values) for form, values in measured))
        tables: dict[str, Callable[[Throughput, str], str]] = {"samples a second": _rate}
        if found.config["infer"].get("energy"):
            tables["joules a sample, of the device alone"] = _joules
        for unit, cell in tables.items():
            rows = ([form.name, *(cell(each, form.name) for each in values.throughput)] for form, values in measured)
            lines += _table([unit, *(f"batch {size}" for size in sizes)], rows)
    noise = [each for each in found.noise if each.device_type == forms[0].device_type]
    if noise:
        shown = ", ".join(f"x{each.ratio:.2f} (batch {each.batch_size})" for each in noise)
        lines += [f"The ratio of the plain form to itself, in the same rounds, is {shown}.", ""]
        lines += [
            f"- With batch {each.batch_size}, no ratio is trusted: {each.refused}." for each in noise if each.refused
        ]
    no_energy = {one.batch_size: one.why_no_energy for _, values in measured for one in values.throughput}
    lines += [
        f"- With batch {size}, the energy of at least one form is unknown: {why}."
        for size, why in no_energy.items()
        if why
    ]
    lines += [f"- **{form.name}**: {form.does}." for form, _ in measured]
    lines += [f"- **{form.name}** is not available: {form.why_not}." for form in forms if form.why_not]
    lines += [f"- {form.name}: {remark}." for form, values in measured for remark in values.remarks]
    return [*lines, ""]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [heads, [":--", *["--:"] * (len(heads) - 1)], *rows]
    return [*(f"| {' | '.join(cells)} |" for cells in lines), ""]


def _cells(form: Form, values: Measured) -> list[str]:
    latency, agreement = values.latency, values.agreement
    p99 = "unknown" if latency.p99_ms is None else f"{latency.p99_ms:.3f}"
    size = f"{values.model_bytes:,} B" + (f"; file {values.file_bytes:,} B" if values.file_bytes else "")
    return [
        form.name,
        f"{latency.p50_ms:.3f} ({latency.p50_low_ms:.3f} to {latency.p50_high_ms:.3f})",
        p99,
        f"{agreement.correct_count:.8g} of {agreement.test_count} ({agreement.accuracy:.2%})",
        f"{agreement.equal_fraction:.2%}",
        f"{agreement.largest_logit_difference:.2g}",
        size,
        f"{values.prepare_seconds:.1f}",
    ]


def _rate(each: Throughput, name: str) -> str:
    rate = f"{each.samples_per_second:,.0f} ({each.low_samples_per_second:,.0f} to {each.high_samples_per_second:,.0f})"
    if name == "eager" or each.ratio is None:
        return rate
    return f"{rate}; x{each.ratio:.2f} ({each.ratio_low:.2f} to {each.ratio_high:.2f})"


def _joules(each: Throughput, _: str) -> str:
    if each.joules_per_sample is None:
        return "unknown"
    return f"{each.joules_per_sample:.3g} ({each.low_joules_per_sample:.3g} to {each.high_joules_per_sample:.3g})"
