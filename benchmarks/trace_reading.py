"""Speed and memory of reading a large trace: `python -m benchmarks.trace_reading --megabytes 1000`.

Writes a made-up trace in the PyTorch profiler's own layout, reads it in a process of its own, and prints the time and
the most memory that the process held; beside them those of `json.load`, which sums nothing up.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from flopwise.profile.read.kineto import read_source
from flopwise.profile.read.opening import open_trace

_HEAD = """{
  "schemaVersion": 1,
  "deviceProperties": [
    {"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85015855104, "computeMajor": 9, "numSms": 132}
  ],
  "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8},
  "traceEvents": ["""
_CALL = """
  {{
    "ph": "X", "cat": "cpu_op", "name": "{operator}", "pid": 4242, "tid": 4242,
    "ts": {host:.3f}, "dur": 4.120,
    "args": {{
      "External id": {number},"Record function id": 0, "Concrete Inputs": ["", "", "", "1", "1"], \
"Input type": ["c10::BFloat16", "c10::BFloat16", "c10::BFloat16", "Scalar", "Scalar"], \
"Input Strides": [[1], [4096, 1], [1, 4096], [], []], \
"Input Dims": [[4096], [{rows}, 4096], [4096, 4096], [], []], "Ev Idx": {number}
    }}
  }},
  {{
    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 4242, "tid": 4242,
    "ts": {launch:.3f}, "dur": 2.310,
    "args": {{
      "External id": {number}, "cbid": 211, "correlation": {number}
    }}
  }},
  {{
    "ph": "s", "id": {number}, "pid": 4242, "tid": 4242, "ts": {launch:.3f},
    "cat": "ac2g", "name": "ac2g"
  }},
  {{
    "ph": "X", "cat": "kernel", "name": "{kernel}", "pid": 0, "tid": 7,
    "ts": {device:.3f}, "dur": {length:.3f},
    "args": {{
      "External id": {number}, "queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": {number},
      "registers per thread": 168, "shared memory": 213248, "blocks per SM": 1.000000, "warps per SM": 12.000000,
      "grid": [132, 1, 1], "block": [384, 1, 1], "est. achieved occupancy %": 19
    }}
  }},"""
_CALLS = (
    ("aten::addmm", "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNT"),
    ("aten::add", "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>"),
    ("aten::native_layer_norm", "void at::native::vectorized_layer_norm_kernel<c10::BFloat16, float>(int, float)"),
    ("c10d::allreduce_", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
)


def write_trace(path: Path, size_bytes: int) -> int:
    """A trace of about that size; the number of its events."""
    chance = random.Random(0)  # noqa: S311 - a made-up trace needs no secrets
    number, host, device, written = 0, 3.9e12, 3.9e12 + 20, 0
    with path.open("w", encoding="utf-8") as file:
        file.write(_HEAD)
        while written < size_bytes:
            number += 1
            operator, kernel = chance.choice(_CALLS)
            length = chance.uniform(1, 30)
            written += file.write(
                _CALL.format(
                    number=number,
                    operator=operator,
                    kernel=kernel,
                    host=host,
                    launch=host + 1.5,
                    device=device,
                    length=length,
                    rows=chance.choice((1024, 2048, 4096)),
                )
            )
            host += 12
            device = max(device + length + chance.choice((0.0, 1.0)), host + 8)
        file.write(f"""
  {{
    "ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "pid": 4242, "tid": 4242,
    "ts": {3.9e12 - 10:.3f}, "dur": {device - 3.9e12:.3f}
  }}
  ],"traceName": "made-up.json" }}
""")
    return 4 * number + 1


def read_and_tell(path: Path) -> None:
    """What the reading process prints: seconds and bytes, as JSON."""
    began = time.perf_counter()
    with open_trace(path) as source:
        profile = read_source(source, "made-up").profiles[0]
    seconds = time.perf_counter() - began
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        json.dumps(
            {
                "seconds": seconds,
                "peak_bytes": peak_bytes,
                "kernels": profile.get("kernel_count"),
                "warnings": profile.warnings,
            }
        )
    )


def load_and_tell(path: Path) -> None:
    """The same for Python's own reader."""
    began = time.perf_counter()
    with path.open(encoding="utf-8") as file:
        events = len(json.load(file)["traceEvents"])
    seconds = time.perf_counter() - began
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "peak_bytes": peak_bytes, "events": events}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000, help="of the trace that is written")
    parser.add_argument("--plain-megabytes", type=int, default=300, help="of that for json.load, which takes far more")
    parser.add_argument("--read", type=Path, help="only read this trace")
    parser.add_argument("--load", type=Path, help="only load this trace with json")
    asked = parser.parse_args()
    if asked.load is not None:
        load_and_tell(asked.load)
        return
    if asked.read is not None:
        read_and_tell(asked.read)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        events = write_trace(path, asked.megabytes * 10**6)
        size = path.stat().st_size
        told = _told(path, "--read")
        print(
            f"{size / 1e6:.0f} MB, {events} events, {told['kernels']:.0f} kernels, {told['warnings'] or 'no warnings'}"
        )
        print(f"{told['seconds']:.1f} s, {told['peak_bytes'] / 2**20:.0f} MiB")
        write_trace(path, asked.plain_megabytes * 10**6)
        ours, plain = _told(path, "--read"), _told(path, "--load")
    print(
        f"of {asked.plain_megabytes} MB: {ours['seconds'] / plain['seconds']:.2f} times the time and "
        f"{ours['peak_bytes'] / plain['peak_bytes']:.2f} times the memory of json.load"
    )


def _told(path: Path, how: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.trace_reading", how, str(path)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


if __name__ == "__main__":
    main()
