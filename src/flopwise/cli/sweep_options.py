"""The options of `flopwise sweep`, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from flopwise.cli.options import Options, OutputOption, StoreOption

LAUNCHERS = ("local", "slurm", "skypilot")


# Where the help says what happens without an option, its default is not printed once more.
@dataclass(frozen=True, kw_only=True)
class SweepOptions(Options):
    file: Annotated[
        str, typer.Argument(help="sweep.toml with [grid] and [run]; options override it.", show_default=False)
    ] = ""
    # Axes: each may have several values.
    model: Annotated[
        str, typer.Option(help="Models, with commas: mpt-125m,mpt-350m; or files of them.", show_default=False)
    ] = ""
    on: Annotated[
        str, typer.Option(help="Hardware: h200,a100-80gb; or a TOML. Default: this machine.", show_default=False)
    ] = ""
    gpus: Annotated[str, typer.Option(help="Devices: 1,2,4 or 1-8*2. Default: 1.", show_default=False)] = ""
    seq: Annotated[
        str, typer.Option(help="Tokens of a sequence: 2k,8k or 512-8k*2. Default: the model's.", show_default=False)
    ] = ""
    batch: Annotated[
        str,
        typer.Option(
            help="Sequences of a step: 64 or 8-64+8; auto: the largest micro-batch that fits. "
            "Default: auto, on a CPU 8.",
            show_default=False,
        ),
    ] = ""
    batch_tokens: Annotated[
        str, typer.Option(help="The same in tokens, for each sequence length: 2M.", show_default=False)
    ] = ""
    micro: Annotated[
        str, typer.Option(help="Sequences that run at once: 1,2,4 or 1-16+5. Default: the plan's.", show_default=False)
    ] = ""
    precision: Annotated[
        str,
        typer.Option(
            help="bf16,fp32; key=format changes the one before it. Default: the device's.", show_default=False
        ),
    ] = ""
    device_mem: Annotated[
        str, typer.Option(help="Caps on device memory: 10-40+10GiB; auto: none.", show_default=False)
    ] = ""
    host_mem: Annotated[
        str, typer.Option(help="Caps on host memory: none,50,100GiB; none: not any.", show_default=False)
    ] = ""
    change: Annotated[
        list[str] | None, typer.Option("--set", help="Change a field of the models: --set layers=2,4. Repeatable.")
    ] = None
    task: Annotated[
        str,
        typer.Option(
            help="language, masked or classification, with commas. Default: what the models are for.",
            show_default=False,
        ),
    ] = ""
    # How it is run.
    steps: Annotated[str, typer.Option(help="Steps of each attempt. Default: 20.", show_default=False)] = ""
    repeat: Annotated[str, typer.Option(help="Measurements of each cell. Default: 1.", show_default=False)] = ""
    time_limit: Annotated[str, typer.Option(help="Of each attempt: 90s, 10m. Default: none.", show_default=False)] = ""
    predict: Annotated[
        bool, typer.Option("--predict", help="Predict alone, all state on the devices; runs and writes nothing.")
    ] = False
    stack: Annotated[
        str,
        typer.Option(
            help="With --predict: the training framework, by name or TOML (`flopwise ls stacks`). Default: kernels.",
            show_default=False,
        ),
    ] = ""
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would run, what fits and how long it takes; writes nothing.")
    ] = False
    resume: Annotated[
        str, typer.Option(help="Go on with a stored sweep, by its name; finished cells stay.", show_default=False)
    ] = ""
    settle: Annotated[
        bool,
        typer.Option("--settle", help="With --resume: write down how its Slurm jobs ended; runs and submits nothing."),
    ] = False
    retry: Annotated[bool, typer.Option("--retry", help="Try cells again that failed or took too long.")] = False
    force: Annotated[bool, typer.Option("--force", help="Try all cells anew, finished ones too.")] = False
    name: Annotated[str, typer.Option(help="Of the sweep. Default: from its cells.", show_default=False)] = ""
    only: Annotated[str, typer.Option(help="Only these cells, by id, with commas.", show_default=False)] = ""
    slots: Annotated[
        str, typer.Option(help="Attempts at once. Default: as many as there are GPUs for.", show_default=False)
    ] = ""
    no_profile: Annotated[bool, typer.Option("--no-profile", help="Without a profile of steady steps.")] = False
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.", show_default=False)] = ""
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data", help="File or folder to train on. Repeatable. Default: the sources of Python's library."
        ),
    ] = None
    tokenizer: Annotated[
        str, typer.Option(help="tokenizer.json or its folder. Default: bytes.", show_default=False)
    ] = ""
    seed: Annotated[
        str, typer.Option(help="Of first weights and of the data's order. Default: 0.", show_default=False)
    ] = ""
    # Where it is run.
    launcher: Annotated[
        str, typer.Option(help="local; slurm: submit jobs; skypilot: write tasks for `sky launch`.")
    ] = "local"
    partition: Annotated[str, typer.Option(help="Slurm's.", show_default=False)] = ""
    account: Annotated[str, typer.Option(help="Slurm's.", show_default=False)] = ""
    gpu_type: Annotated[str, typer.Option(help="GPUs as Slurm's site calls them: h200.", show_default=False)] = ""
    gpus_per_node: Annotated[str, typer.Option(help="At most, with Slurm. Default: 8.", show_default=False)] = ""
    sbatch: Annotated[
        list[str] | None, typer.Option("--sbatch", help="A further option of sbatch: --sbatch=--qos=high. Repeatable.")
    ] = None
    activate: Annotated[
        str, typer.Option(help="Shell command before a job's, with Slurm: 'module load cuda'.", show_default=False)
    ] = ""
    accelerator: Annotated[str, typer.Option(help="As SkyPilot calls it: H100.", show_default=False)] = ""
    infra: Annotated[str, typer.Option(help="SkyPilot's: aws, gcp/us-central1, k8s.", show_default=False)] = ""
    spot: Annotated[bool, typer.Option("--spot", help="Spot machines, with SkyPilot.")] = False
    bucket: Annotated[str, typer.Option(help="Where SkyPilot's machines copy results: s3://…", show_default=False)] = ""
    store: StoreOption = ""
    output: OutputOption = "table"
