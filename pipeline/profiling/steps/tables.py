"""Format a profile as a self-contained Markdown page."""

from __future__ import annotations

from pipeline.profiling.steps.profile_file import Profile

LARGE_OVERHEAD = 0.3
"""Above this overhead, the profiler distorts its own figures, and the page says so."""

_MEANINGS = {
    "forward": "the forward pass and the loss",
    "backward": "the backward pass, including recomputation",
    "optimizer": "the update of the parameters",
    "rest": "other work in the step, such as clearing gradients; or a CUDA graph of the whole step",
    "communication": "exposed communication: the device does nothing else; this includes waits for a slower process",
    "input": "the step waits for its batch, or the device only prepares the batch",
    "idle": "none of the parts above: on a GPU, the host has not launched the next kernel yet; on a CPU, Python runs "
    "between operators",
}


def markdown(profile: Profile, *, on_gpu: bool) -> str:
    """Return the page ``profile.md``."""
    ranks, step = profile.ranks, profile.ranks[0].step_ms
    place = f"{profile.world_size} processes over {profile.backend}" if profile.backend else "one process"
    where = "the GPU time of the kernels that they launched" if on_gpu else "their CPU time"

    def row(part: str, key: str, share: str, meaning: str) -> str:
        return f"| {part} | {' | '.join(f'{getattr(rank, key):.2f}' for rank in ranks)} | {share} | {meaning} |"

    lines = [
        f"# Where the time of a step of {profile.variant} goes",
        "",
        *(f"- **{finding.text}**" for finding in profile.findings),
        "",
        f"The times are means of {profile.steps} warm steps of {place} on {profile.device}, with seed {profile.seed}. "
        f"{_overhead(profile)}",
        "",
        f"| part | {' | '.join(f'rank {rank}, ms' for rank in range(len(ranks)))} | largest share | |",
        "| :-- |" + " --: |" * (len(ranks) + 1) + " :-- |",
        *(row(part, f"{part}_ms", f"{max(each.fraction(part) for each in ranks):.1%}", meaning)
          for part, meaning in _MEANINGS.items()),
        row("**step**", "step_ms", "", "the sum of the parts above"),
    ]  # fmt: skip
    if any(rank.communication_hidden_ms for rank in ranks):
        said = "during other work, so it takes no extra time"
        lines.append(row("communication, hidden", "communication_hidden_ms", "", said))
    lines += [
        "",
        f"## Operators of the main process, by {where}",
        "",
        "| operator | ms a step | of the step | calls a step |",
        "| :-- | --: | --: | --: |",
        *(
            f"| `{each.name}` | {each.step_ms:.3f} | {each.step_ms / step:.1%} | {each.calls_per_step:g} |"
            for each in profile.operators
        ),
        "",
        "An operator's time does not include the operators that it calls.",
        "",
        "## Other files of this profile",
        "",
        "- `trace.json.gz`: the main process's trace, as a time line. Open this file in <https://ui.perfetto.dev>. The "
        "annotations `step/...` are the parts of the step.",
    ]
    if profile.has_memory_snapshot:
        lines.append(
            "- `memory.pickle`: the allocations of GPU memory in two training steps, with the code that made them. "
            "Open this file in <https://docs.pytorch.org/memory_viz>. This site and Perfetto's work in the browser and "
            "do not upload your files."
        )
    lines.append("- `profile.json`: these figures for programs.")
    return "\n".join(lines) + "\n"


def _overhead(profile: Profile) -> str:
    slower = f"{max(0.0, profile.overhead_fraction):.0%}"
    text = (
        f"The profiler slowed the step down by {slower}, from {profile.step_p50_ms:.2f} to "
        f"{profile.profiled_step_p50_ms:.2f} ms (medians). The shares below refer to the profiled step, so no "
        "throughput is computed from them."
    )
    if profile.overhead_fraction > LARGE_OVERHEAD:
        text += " Because of this overhead, small operators seem to take more time here than without the profiler."
    return text
