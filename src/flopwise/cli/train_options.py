"""The options of `flopwise train`, in words."""

from __future__ import annotations

from typing import Annotated

import typer

# Where the help says what happens without an option, its default is not printed once more.

ModelArgument = Annotated[
    str,
    typer.Argument(help="Catalogue name, config.json or its folder, a TOML, or a plan. Default: a small Llama."),
]
DataOption = Annotated[
    list[str] | None,
    typer.Option("--data", help="File or folder to train on. Repeatable. Default: the sources of Python's library."),
]
EvaluationDataOption = Annotated[
    list[str] | None,
    typer.Option("--eval-data", help="File or folder that is held out. Repeatable. Default: a share of the data."),
]
TokenizerOption = Annotated[str, typer.Option(help="tokenizer.json or its folder. Default: bytes.")]
TaskOption = Annotated[str, typer.Option(help="language or classification; auto: what the model is for.")]
TextColumnOption = Annotated[str, typer.Option(help="Where the text is, in JSON lines and CSV.")]
LabelColumnOption = Annotated[str, typer.Option(help="Where the label is.")]
PaddingOption = Annotated[str, typer.Option(help="Samples are padded to --seq (length), or to the longest of a batch.")]
StepsOption = Annotated[str, typer.Option(help="Steps: 100.")]
EpochsOption = Annotated[str, typer.Option(help="Times through the data instead: 3, 0.5.")]
LearningRateOption = Annotated[str, typer.Option(help="The highest: 3e-4.")]
WarmupOption = Annotated[str, typer.Option(help="Steps until it is reached.")]
ScheduleOption = Annotated[str, typer.Option(help="What follows: cosine, linear or constant.")]
WeightDecayOption = Annotated[str, typer.Option(help="For matrices and tables: 0.1.")]
Beta1Option = Annotated[str, typer.Option(help="AdamW's first: 0.9.")]
Beta2Option = Annotated[str, typer.Option(help="AdamW's second: 0.95.")]
ClipOption = Annotated[
    str, typer.Option(help="Largest norm of all gradients together: 1.0. Default: none.", show_default=False)
]
StochasticRoundingOption = Annotated[
    bool, typer.Option("--stochastic-rounding", help="Round bf16 weights up or down by chance.")
]
SeedOption = Annotated[str, typer.Option(help="Of first weights and of the data's order.")]
HostMemoryOption = Annotated[
    str, typer.Option(help="Cap on host memory: 110GiB. Default: most of what there is.", show_default=False)
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
OnOption = Annotated[
    str,
    typer.Option(
        help="This machine's hardware as `flopwise calibrate` measured it: a TOML. Default: the catalogue's, or a "
        "second of measuring.",
        show_default=False,
    ),
]
DevicesOption = Annotated[
    str,
    typer.Option(
        help="Devices, a process for each; torchrun or srun may start them too. Default: 1.", show_default=False
    ),
]
WeightsOption = Annotated[str, typer.Option(help="Folder of Hugging Face weights, or a checkpoint, to begin with.")]
FromScratchOption = Annotated[
    bool, typer.Option("--from-scratch", help="Draw first weights though the model's folder has some.")
]
AnywhereOption = Annotated[
    bool,
    typer.Option("--anywhere", help="Run a plan on other hardware than it is for; more ranks than a CPU has cores."),
]
DeterministicOption = Annotated[
    bool, typer.Option("--deterministic", help="Only kernels that give the same bits every time.")
]
CheckpointEveryOption = Annotated[
    str, typer.Option(help="Steps between checkpoints. Default: at the end.", show_default=False)
]
NoCheckpointOption = Annotated[
    bool, typer.Option("--no-checkpoint", help="Save no weights, for a run that is only measured.")
]
KeepOption = Annotated[str, typer.Option(help="Checkpoints that are kept, the last ones.")]
EvaluateEveryOption = Annotated[
    str, typer.Option(help="Steps between evaluations. Default: at the end.", show_default=False)
]
ProfileOption = Annotated[
    bool, typer.Option("--profile", help="Profile a window of steady steps; `flopwise why` then says what limits them.")
]
ProfileStepsOption = Annotated[
    str, typer.Option(help="Steps that are traced, with --profile. Default: 3.", show_default=False)
]
StoreOption = Annotated[str, typer.Option(help="Folder of runs. Default: as FLOPWISE_STORE says, else runs.")]
ResumeOption = Annotated[str, typer.Option(help="Go on with a run: its number or folder, or last.")]
OutputOption = Annotated[str, typer.Option("--output", "-o", help="table or json.")]
PrecisionOption = Annotated[
    str, typer.Option(help="bf16, bf16-mixed, bf16-amp, fp32, tf32 or fp8; changes as key=format: bf16,gradients=fp32.")
]
