"""Stores of runs that were never run, in the format of today. Who changes the format changes this; the figures stay."""

from __future__ import annotations

from pathlib import Path

from tests.support.run_stores import a_cell, a_profile, a_record, make_store, noisy_steps, write_attempted, write_run

LENGTHS = ({"sequence_tokens": 512}, {"sequence_tokens": 1024}, {"sequence_tokens": 2048})


def make_stores(folder: Path) -> None:
    """`runs`: single runs and a sweep in which one cell ran out of memory; `before`, `after`: the same cells twice."""
    _make_runs(folder / "runs")
    lengths = [{"sequence_tokens": 512 * number, "step_s": 0.5 * number} for number in (1, 2, 3)]
    make_store(folder / "before", lengths, sweep="nightly", repeats=2, seed=1)
    slower = [{**lengths[0], "step_s": 0.525}, *lengths[1:]]
    make_store(folder / "after", slower, sweep="nightly", repeats=2, seed=7)


def _make_runs(store: Path) -> None:
    write_run(store, noisy_steps(20, 0.5, seed=1), profile=a_profile("run 0001"))
    slow = a_profile("run 0002", idle_s=0.2, device_busy_s=0.5, device_span_s=0.7, mfu=0.29)
    write_run(store, noisy_steps(30, 0.7, seed=2), profile=slow, sequence_tokens=2048, batch_sequences=8)
    write_run(store, noisy_steps(3, 0.6, seed=3), state="running", measurement=None, metrics={}, ended=None)
    write_run(store, noisy_steps(12, 1.5, seed=4), model="gpt2-medium", hardware="h100-sxm", devices=4)
    make_store(store, LENGTHS, sweep="grid", repeats=2, steps=24, step_s=0.4)
    # One cell: of several, those without runs would stand in the order of their ids.
    reason = "162 GiB are needed and the device has 139 GiB"
    write_attempted(store, a_cell(a_record(sequence_tokens=32_768)), "oom", sweep="lost", reason=reason)
