"""`make demo`: predictions, plans, a small model trained and profiled here, a sweep, its table and its page."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path("build") / "demo.html"
COMMANDS = (
    "predict llama-3-8b,qwen3-8b,mpt-7b --on h100-sxm,h200,rtx-4090 --seq 2k",
    "predict llama-3-8b --on h200 --seq 8k --batch 16",
    "predict gpt2,bert-base,llama-3-1b --on this-machine --seq 512 --batch 8",
    "plan llama-3-8b --on h200 --seq 8k --device-mem 40GiB --host-mem 110GiB",
    "plan llama-3-70b --on h100-sxm --gpus 64 --seq 8k --batch-tokens 4M --precision bf16-mixed",
    "validate megatron --leave-out model",
    "train --steps 120 --profile --store {store}",
    "why last --store {store}",
    "train --lora 4 --base nf4 --steps 8 --store {store}",
    "train benchmarks/data/mixture-1m.toml --steps 12 --store {store}",
    "sweep --model mpt-13b,mpt-30b --seq 2k-16k*2 --batch-tokens 2M --gpus 8 --on h100-sxm --dry-run",
    "sweep --model benchmarks/data/mpt-1m.toml,benchmarks/data/mpt-4m.toml --seq 128,256 --batch 4 --steps 12 "
    "--device cpu --on this-cpu --name demo --store {store}",
    "report --store {store} -o html -w {page}",
    "report --store {store}",
)


def main() -> None:
    PAGE.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="flopwise-demo-") as store:
        for template in COMMANDS:
            command = template.format(store=store, page=PAGE)
            print(f"$ flopwise {command}", flush=True)
            subprocess.run([sys.executable, "-P", "-m", "flopwise", *command.split()], check=True)
            print(flush=True)
    print(f"the page of these runs: {PAGE.resolve()}")
    print("next: flopwise sweep --model MODEL --seq 2k-16k*2, a name of `flopwise ls models` or your own config.json")


if __name__ == "__main__":
    main()
