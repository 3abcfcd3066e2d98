"""Rows of results for tests: one that went well, and what can go wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flopwise.store.results import Result

GIB = 2**30


def a_result(**changes: Any) -> Result:
    """A run of a streamed 8B model under caps; the figures are made up and hang together."""
    tokens_per_s, batch, sequence = 11_230.0, 24, 8192
    row = Result(
        cell="0123456789ab",
        run="0142",
        state="ok",
        model="llama-3-8b",
        hardware="h200",
        devices=1,
        sequence_tokens=sequence,
        batch_sequences=batch,
        micro_batch_sequences=2,
        accumulation_steps=12,
        batch_tokens=batch * sequence,
        precision="bf16",
        optimizer="adamw",
        recompute="saves 24 full, 8 input",
        device_cap_bytes=40 * GIB,
        host_cap_bytes=110 * GIB,
        n_params=8_030_261_248,
        steps=18,
        step_s=batch * sequence / tokens_per_s,
        step_s_p20=17.4,
        step_s_p80=17.6,
        tokens_per_s=tokens_per_s,
        tokens_per_s_p20=11_190.0,
        tokens_per_s_p80=11_260.0,
        tokens_per_s_per_device=tokens_per_s,
        samples_per_s=tokens_per_s / sequence,
        model_flops_per_s_per_device=5.78e14,
        mfu=0.584,
        hfu=0.609,
        convention="causal",
        peak_flops=989.5e12,
        peak_format="bf16",
        device_bytes=33 * GIB,
        host_bytes=63 * GIB,
        power_limit_w=700.0,
        energy_j_per_token=0.062,
        predicted_tokens_per_s=11_300.0,
        prediction_error=11_300 / 11_230 - 1,
        bound="compute",
        started="2026-03-01T12:00:00+01:00",
        flopwise="0.1.0",
        commit="c0ffee" * 6 + "c0ff",
        python="3.11.9",
        torch="2.13.0",
        cuda="13.0",
        driver="580.95.05",
        card="NVIDIA H200",
    )
    return replace(row, **changes)


MEASURED = (
    *("steps", "step_s", "step_s_p20", "step_s_p80", "tokens_per_s", "tokens_per_s_p20", "tokens_per_s_p80"),
    *("tokens_per_s_per_device", "samples_per_s", "model_flops_per_s_per_device", "mfu", "hfu", "convention"),
    *("peak_flops", "peak_format", "device_bytes", "host_bytes", "energy_j_per_token", "prediction_error", "bound"),
)


def lost(state: str, reason: str | None, **changes: Any) -> Result:
    """The same where nothing could be measured."""
    return a_result(**{**dict.fromkeys(MEASURED), "state": state, "reason": reason, **changes})


OOM_REASON = "CUDA out of memory: 162 GiB are needed and the device has 139 GiB"


def mixed() -> list[Result]:
    """What a sweep leaves behind."""
    return [
        a_result(),
        a_result(run="0143", sequence_tokens=65_536, batch_sequences=3, tokens_per_s=8_123.0, mfu=0.61),
        lost("oom", OOM_REASON, run="0144", sequence_tokens=131_072, cell="bb3456789abb"),
        lost("timeout", "it took more than 600 s", run=None, model="mpt-7b", cell="cc3456789abb"),
        lost("failed", "its process was killed", run="0146", model="mpt-7b"),
        lost("skipped", "no plan fits in 8 GiB", run=None, model="mpt-70b", cell="dd3456789abb"),
        a_result(run="0147", mfu=1.33, hfu=1.5),
    ]
