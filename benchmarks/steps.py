"""Predicted against measured training steps: `python -m benchmarks.steps`.

The measured rows are those of `benchmarks.gpu_steps` on one H200. No constant was fitted to them: the device's
efficiencies come from single kernels. Memory is compared with the peak that torch allocated: torch frees activations
while gradients grow, which takes less than the sum of the owners, and its plain loss keeps copies of the logits, which
takes more than a fused one.
"""

from __future__ import annotations

import csv
import statistics
from dataclasses import dataclass
from pathlib import Path

from flopwise.catalog.load import load_hardware, load_model
from flopwise.predict import Setup, step
from flopwise.records.prediction import Prediction
from flopwise.work.formats import POLICIES

ROWS = Path(__file__).parent / "data" / "steps_h200.csv"


@dataclass(frozen=True, slots=True)
class Compared:
    """One measured step and its prediction."""

    measured_s: float
    measured_bytes: int
    prediction: Prediction

    @property
    def error(self) -> float:
        """Predicted over measured time, less one."""
        return self.prediction.step_s / self.measured_s - 1


def compared() -> list[Compared]:
    """Predict every measured row."""
    hardware = load_hardware("h200")
    found = []
    with ROWS.open(encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            setup = Setup(
                model=load_model(row["model"]),
                hardware=hardware,
                sequence_tokens=int(row["sequence_tokens"]),
                batch_sequences=int(row["batch_sequences"]),
                micro_batch_sequences=int(row["batch_sequences"]),
                formats=POLICIES["bf16"],
                # torch's checkpoint leaves out the last product, whose result backward does not read: our `input`.
                recompute="input" if row["recompute"] == "checkpoint" else "none",
            )
            found.append(Compared(float(row["step_s"]), int(row["peak_bytes"]), step(setup)))
    return found


def main() -> None:
    rows = compared()
    names = f"{'model':<12}{'seq':>7}{'batch':>6} {'recompute':<10}"
    print(f"{names}{'measured':>10}{'predicted':>10}{'error':>8}{'memory':>8}")
    for row in rows:
        prediction = row.prediction
        shape = f"{prediction.sequence_tokens:>7}{prediction.batch_sequences:>6} {prediction.recompute:<10}"
        times = f"{row.measured_s * 1e3:>7.0f} ms{prediction.step_s * 1e3:>7.0f} ms{100 * row.error:>+7.1f}%"
        memory = f"{100 * (prediction.device_bytes.total / row.measured_bytes - 1):>+7.1f}%"
        print(f"{prediction.model:<12}{shape}{times}{memory}")
    errors = sorted(abs(row.error) for row in rows)
    print(
        f"\n{len(rows)} steps: median error {100 * statistics.median(errors):.1f} %, largest {100 * errors[-1]:.1f} %"
    )


if __name__ == "__main__":
    main()
