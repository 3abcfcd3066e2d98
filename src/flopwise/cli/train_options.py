"""The options of `flopwise train`, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from flopwise.cli.options import (
    BaseOption,
    BatchOption,
    DeviceMemoryOption,
    DoraOption,
    FreezeOption,
    LoraAlphaOption,
    LoraOnOption,
    LoraOption,
    MicroOption,
    Options,
    RsloraOption,
    SequenceOption,
    SetOption,
    StoreOption,
)


# Where the help says what happens without an option, its default is not printed once more.
@dataclass(frozen=True, kw_only=True)
class TrainOptions(Options):
    model: Annotated[
        str,
        typer.Argument(help="Catalogue name, config.json or its folder, a TOML, or a plan. Default: a small Llama."),
    ] = ""
    change: SetOption = None
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="File or folder to train on, perhaps with how often an epoch sees it: a.jsonl:2. Repeatable. "
            "Default: the sources of Python's library.",
        ),
    ] = None
    eval_data: Annotated[
        list[str] | None,
        typer.Option("--eval-data", help="File or folder that is held out. Repeatable. Default: a share of the data."),
    ] = None
    tokenizer: Annotated[
        str, typer.Option(help="tokenizer.json or its folder. Default: that of the model's folder, else bytes.")
    ] = ""
    task: Annotated[
        str,
        typer.Option(
            help="language, masked: hidden tokens of an encoder; classification, or dpo: pairs of answers; "
            "auto: what the model is for."
        ),
    ] = "auto"
    text_column: Annotated[str, typer.Option(help="Where the text is, in rows; of pairs both: premise,hypothesis.")] = (
        "text"
    )
    label_column: Annotated[str, typer.Option(help="Where the label is.")] = "label"
    train_on: Annotated[
        str, typer.Option(help="Of conversations, prompts and instructions: answers, or all tokens.")
    ] = "answers"
    data_format: Annotated[
        str,
        typer.Option(
            help="tokens-uint16, tokens-uint32 or tokens-int32: files of token identifiers, as nanoGPT writes them; "
            ".npy too. Default: text, or rows.",
            show_default=False,
        ),
    ] = "auto"
    mask_share: Annotated[
        str,
        typer.Option(
            help="Of masked, the share of tokens that are hidden: 0.15, 30%. Default: 0.15; ModernBERT's 0.3.",
            show_default=False,
        ),
    ] = "auto"
    whole_words: Annotated[
        bool, typer.Option("--whole-words", help="Of masked, hide the tokens of a word together (WordPiece).")
    ] = False
    no_packing: Annotated[
        bool, typer.Option("--no-packing", help="One conversation or other example a sequence, instead of several.")
    ] = False
    stream_data: Annotated[
        bool | None,
        typer.Option(
            "--stream-data/--no-stream-data",
            help="Begin before all text is tokenized. Default: from 4 GiB of it on, where --steps says how long.",
            show_default=False,
        ),
    ] = None
    padding: Annotated[
        str, typer.Option(help="Samples are padded to --seq (length), or to the longest of a batch.")
    ] = "length"
    steps: Annotated[str, typer.Option(help="Steps: 100.")] = "auto"
    epochs: Annotated[str, typer.Option(help="Times through the data instead: 3, 0.5.")] = "auto"
    seq: SequenceOption = "auto"
    batch: BatchOption = "auto"
    micro: MicroOption = "auto"
    precision: Annotated[
        str,
        typer.Option(help="bf16, bf16-mixed, bf16-amp, fp32, tf32 or fp8; changes as key=format: bf16,gradients=fp32."),
    ] = "auto"
    lora: LoraOption = "auto"
    lora_alpha: LoraAlphaOption = "auto"
    lora_on: LoraOnOption = "auto"
    rslora: RsloraOption = False
    dora: DoraOption = False
    freeze: FreezeOption = "auto"
    base: BaseOption = "auto"
    adapters: Annotated[
        str, typer.Option(help="Folder of adapters to go on with, as PEFT saves them.", show_default=False)
    ] = ""
    merge: Annotated[
        bool, typer.Option("--merge", help="At the end, write the whole model with its adapters merged into it.")
    ] = False
    learning_rate: Annotated[str, typer.Option(help="The highest: 3e-4.")] = "auto"
    warmup: Annotated[
        str,
        typer.Option(help="Steps until it is reached, or their share of all: 100, 3%. Default: a tenth, 100 at most."),
    ] = "auto"
    schedule: Annotated[
        str, typer.Option(help="What follows: cosine, linear, constant, inverse-sqrt, or wsd: stable, then a decay.")
    ] = "auto"
    min_learning_rate: Annotated[
        str,
        typer.Option(
            help="What it ends at: 3e-5. Default: a tenth of the highest for a cosine, else 0.", show_default=False
        ),
    ] = "auto"
    decay_share: Annotated[
        str, typer.Option(help="Of all steps, those of the decay of wsd: 0.1, 20%. Default: 0.1.", show_default=False)
    ] = "auto"
    decay_shape: Annotated[str, typer.Option(help="Of that decay: linear or sqrt.", show_default=False)] = "auto"
    weight_decay: Annotated[str, typer.Option(help="For matrices and tables: 0.1.")] = "auto"
    optimizer: Annotated[
        str,
        typer.Option(
            help="adamw, adamw-8bit, muon, lion, sgd, sgd-momentum or adafactor. Default: adamw.", show_default=False
        ),
    ] = "auto"
    beta1: Annotated[str, typer.Option(help="Of AdamW and Lion: 0.9.")] = "auto"
    beta2: Annotated[str, typer.Option(help="Of AdamW 0.95, of Lion 0.99.")] = "auto"
    epsilon: Annotated[str, typer.Option(help="Of AdamW: 1e-8.")] = "auto"
    momentum: Annotated[str, typer.Option(help="Of Muon 0.95; of SGD, which then has one, 0.9.")] = "auto"
    nesterov: Annotated[bool, typer.Option("--nesterov", help="SGD's momentum looks ahead.")] = False
    ema: Annotated[
        str,
        typer.Option(
            help="Keep a mean of the weights, which keeps this much of itself a step: 0.999. It is saved as a model of "
            "its own.",
            show_default=False,
        ),
    ] = "auto"
    label_smoothing: Annotated[
        str, typer.Option(help="Share of what is wanted that all answers have alike: 0.1.", show_default=False)
    ] = "auto"
    z_loss: Annotated[
        str, typer.Option(help="Weight of the softmax's squared log-denominator: 1e-4.", show_default=False)
    ] = "auto"
    beta: Annotated[str, typer.Option(help="Of dpo, how near it stays to the reference: 0.1.", show_default=False)] = (
        "auto"
    )
    dpo_label_smoothing: Annotated[
        str, typer.Option(help="Of dpo, the share of pairs taken to be the wrong way round: 0.", show_default=False)
    ] = "auto"
    dropout: Annotated[
        str,
        typer.Option(help="Share dropped at every site: 0.1; 0 for none. Default: the model's.", show_default=False),
    ] = "auto"
    clip: Annotated[
        str,
        typer.Option(
            help="Largest norm of all gradients together: 1.0; 0 for none. Default: 1.0 from weights, else none.",
            show_default=False,
        ),
    ] = "auto"
    stochastic_rounding: Annotated[
        bool | None,
        typer.Option(
            "--stochastic-rounding/--no-stochastic-rounding",
            help="Round bf16 weights up or down by chance. Default: where they have no more exact copy.",
            show_default=False,
        ),
    ] = None
    seed: Annotated[str, typer.Option(help="Of first weights and of the data's order.")] = "0"
    device_mem: DeviceMemoryOption = "auto"
    host_mem: Annotated[
        str, typer.Option(help="Cap on host memory: 110GiB. Default: most of what there is.", show_default=False)
    ] = "auto"
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"
    on: Annotated[
        str,
        typer.Option(
            help="This machine's hardware as `flopwise calibrate` measured it: a TOML. Default: the catalogue's, or a "
            "second of measuring.",
            show_default=False,
        ),
    ] = ""
    gpus: Annotated[
        str,
        typer.Option(
            help="Devices, a process for each; torchrun or srun may start them too. Default: 1.", show_default=False
        ),
    ] = "auto"
    weights: Annotated[str, typer.Option(help="Folder of Hugging Face weights, or a checkpoint, to begin with.")] = ""
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Draw first weights though the model's folder has some.")
    ] = False
    anywhere: Annotated[
        bool,
        typer.Option(
            "--anywhere", help="Run a plan on other hardware than it is for; more ranks than a CPU has cores."
        ),
    ] = False
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Only kernels that give the same bits every time.")
    ] = False
    checkpoint_every: Annotated[
        str, typer.Option(help="Steps between checkpoints. Default: at the end.", show_default=False)
    ] = "auto"
    no_checkpoint: Annotated[
        bool, typer.Option("--no-checkpoint", help="Save no weights, for a run that is only measured.")
    ] = False
    keep: Annotated[str, typer.Option(help="Checkpoints that are kept, the last ones.")] = "2"
    evaluate_every: Annotated[
        str,
        typer.Option(
            help="Steps between evaluations. Default: at the end.",
            show_default=False,
        ),
    ] = "auto"
    patience: Annotated[
        str,
        typer.Option(
            help="End when so many evaluations in a row were not better than the best: 3. Default: never.",
            show_default=False,
        ),
    ] = "auto"
    keep_best: Annotated[
        bool,
        typer.Option("--keep-best", help="Save after every evaluation that is the best, and keep that checkpoint."),
    ] = False
    log: Annotated[
        list[str] | None,
        typer.Option(
            "--log",
            help="Tell a tracker of every step: wandb, trackio, tensorboard, where it is installed; with a project as "
            "wandb:NAME. wandb is offline unless WANDB_MODE is set. Repeatable.",
        ),
    ] = None
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Profile a window of steady steps; `flopwise why` then says what limits them."),
    ] = False
    profile_steps: Annotated[
        str, typer.Option(help="Steps that are traced, with --profile. Default: 3.", show_default=False)
    ] = "auto"
    store: StoreOption = ""
    resume: Annotated[str, typer.Option(help="Go on with a run: its number or folder, or last.")] = ""
    output: Annotated[str, typer.Option("--output", "-o", help="table or json.")] = "table"
