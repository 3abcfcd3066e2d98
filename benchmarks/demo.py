"""`make demo`: predictions, plans for one device and a cluster, a small model trained and profiled here."""

from __future__ import annotations

import subprocess
import sys
import tempfile

COMMANDS = (
    "predict llama-3-8b,qwen3-8b,mpt-7b --on h100-sxm,h200,rtx-4090 --seq 2k",
    "predict llama-3-8b --on h200 --seq 8k --batch 16",
    "predict gpt2,bert-base,llama-3-1b --on this-machine --seq 512 --batch 8",
    "plan llama-3-8b --on h200 --seq 8k --device-mem 40GiB --host-mem 110GiB",
    "plan llama-3-70b --on h100-sxm --gpus 64 --seq 8k --batch-tokens 4M --precision bf16-mixed",
    "validate megatron --leave-out model",
    "train --steps 120 --profile --store {store}",
    "profile show last --store {store}",
    "why last --store {store}",
    "ls runs --store {store}",
)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="flopwise-demo-") as store:
        for template in COMMANDS:
            command = template.format(store=store)
            print(f"$ flopwise {command}", flush=True)
            subprocess.run([sys.executable, "-m", "flopwise", *command.split()], check=True)
            print(flush=True)
    print(
        "next: flopwise plan MODEL --on HARDWARE --gpus N, with a name of `flopwise ls models` or your own config.json"
    )


if __name__ == "__main__":
    main()
