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
    "idle": "none of these: {idle}",
}
_IDLE = {True: "the GPU has nothing to do while the host launches kernels", False: "Python between operators"}


def markdown(profile: Profile, *, on_gpu: bool) -> str:
    """Return the page ``profile.md``."""
    several = len(profile.ranks) > 1
    place = f"{profile.world_size} processes over {profile.backend}" if profile.backend else "one process"
    lines = [
        f"# Where the time of a step of {profile.variant} goes",
        "",
        *(f"- **{finding.text}**" for finding in profile.findings),
        "",
        f"The times are means of {profile.steps} warm steps of {place} on {profile.device}, with seed {profile.seed}. "
        f"{_overhead(profile)}",
        "",
        "| part | " + " | ".join(f"rank {rank}" if several else "ms" for rank in range(len(profile.ranks))) + " | | |",
        "| :-- |" + " --: |" * (len(profile.ranks) + 1) + " :-- |",
    ]
    for part, meaning in _MEANINGS.items():
        cells = [f"{getattr(rank, f'{part}_ms'):.2f}{' ms' if several else ''}" for rank in profile.ranks]
        share = max(rank.fraction(part) for rank in profile.ranks)
        meaning = meaning.format(idle=_IDLE[on_gpu])
        lines.append(f"| {part} | {' | '.join(cells)} | {'up to ' if several else ''}{share:.1%} | {meaning} |")
    whole = " | ".join(f"{rank.step_ms:.2f}{' ms' if several else ''}" for rank in profile.ranks)
    lines.append(f"| **step** | {whole} | | the sum of the parts above |")
    if any(rank.communication_hidden_ms for rank in profile.ranks):
        hidden = " | ".join(f"{rank.communication_hidden_ms:.2f}{' ms' if several else ''}" for rank in profile.ranks)
        lines.append(f"| communication, hidden | {hidden} | | during other work, so it takes no extra time |")
    where = "the GPU time of the kernels that they launched" if on_gpu else "their CPU time"
    lines += [
        "",
        f"## Operators of the main process, by {where}",
        "",
        "| operator | ms a step | of the step | calls a step |",
        "| :-- | --: | --: | --: |",
    ]
    step = profile.ranks[0].step_ms
    lines += [
        f"| `{each.name}` | {each.step_ms:.3f} | {each.step_ms / step:.1%} | {each.calls_per_step:g} |"
        for each in profile.operators
    ]
    lines += [
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
            "- `memory.pickle`: the code that allocated the GPU's memory in two steps. Open this file in "
            "<https://docs.pytorch.org/memory_viz>. Both sites work in the browser and do not upload the file."
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
