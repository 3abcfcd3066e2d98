"""Speed of the predictor: `python -m benchmarks.speed`. Nothing here is a test; absolute times are this machine's."""

from __future__ import annotations

import subprocess
import sys
import time

from flopwise.catalog.load import hardware_names, load_hardware, load_model, model_names
from flopwise.plan import fastest
from flopwise.predict import Setup, step
from flopwise.predict.kernels.calls import calls_for
from flopwise.setup.hardware import Hardware
from flopwise.sweep.grid import expand, read_axes
from flopwise.sweep.predicting import foresee_all
from flopwise.work.formats import POLICIES
from flopwise.work.model import Model


def catalogue() -> tuple[list[Model], list[Hardware]]:
    models = [load_model(name) for name in model_names()]
    devices = [load_hardware(name) for name in hardware_names()]
    return models, [device for device in devices if "bf16" in device.device.peak_flops]


def single_rate() -> float:
    """Whole predictions a second, operator by operator, as `predict` makes them."""
    models, devices = catalogue()
    started = time.process_time()
    count = 0
    for model in models:
        for device in devices:
            step(Setup(model=model, hardware=device, sequence_tokens=20, batch_sequences=8))
            count += 1
    return count / (time.process_time() - started)


def sweep_rate() -> float:
    """Cells of a sweep foreseen a second, as `sweep --predict` does it."""
    words = {"model": "mpt-125m,mpt-350m,mpt-1b,mpt-7b", "seq": "512-32k*2", "batch": "8-160+17", "gpus": "1,8"}
    named = {"h200": load_hardware("h200")}
    cells = expand(read_axes({**words, "on": "h200"}), named).settings
    started = time.process_time()
    foresee_all(cells, named, steps=20, to_run=False)
    return len(cells) / (time.process_time() - started)


def search(name: str, device: str, devices: int) -> tuple[int, int, float]:
    """Strategies tried for a model on so many devices, those of them that were timed, and seconds of processor time."""
    setup = Setup(
        model=load_model(name),
        hardware=load_hardware(device),
        sequence_tokens=2048,
        batch_sequences=1536,
        formats=POLICIES["bf16-mixed"],
    )
    started = time.process_time()
    calls_for.cache_clear()
    found = fastest(setup, devices)
    return found.evaluated, found.timed, time.process_time() - started


def command_seconds(*arguments: str) -> float:
    """Wall time of a command, the best of five."""
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-P", "-m", "flopwise", *arguments], check=True, capture_output=True)
        best = min(best, time.perf_counter() - started)
    return best


def main() -> None:
    print(f"{'what':<78}{'measured':>12}")
    print(f"{'single predictions a second on one core':<78}{single_rate():>12,.0f}")
    print(f"{'cells of a sweep foreseen a second on one core':<78}{sweep_rate():>12,.0f}")
    for device, devices in (("a100-80gb", 64), ("h100-sxm", 4096)):
        evaluated, timed, seconds = search("gpt-3-175b", device, devices)
        for what, count in (("strategies", evaluated), ("of them timed", timed)):
            line = f"search, GPT-3 on {devices:,} {device}: {count:,} {what}, a second"
            print(f"{line:<78}{count / seconds:>12,.0f}")
    print(f"{'flopwise --help, seconds':<78}{command_seconds('--help'):>12.3f}")
    command = ("predict", "llama-3-8b", "--on", "h100-sxm")
    print(f"{'flopwise predict llama-3-8b --on h100-sxm, seconds':<78}{command_seconds(*command):>12.3f}")


if __name__ == "__main__":
    main()
