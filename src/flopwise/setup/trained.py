"""What of a model is trained, in the words of options: adapters, or all but some parts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flopwise.base.errors import FlopwiseError, shown
from flopwise.setup.parallel import Parallel
from flopwise.setup.training import MASK_SHARE, MASK_SHARES, Task, is_number
from flopwise.work.adapters import Adapters, frozen_layers, parse_frozen
from flopwise.work.formats import check_base_name
from flopwise.work.layer_names import parse_targets
from flopwise.work.model import Model
from flopwise.work.transformer import Transformer

ALPHA_PER_RANK = 2.0
"""Of an alpha that nobody gives: the scale of adapters is then 2, whatever their rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedWords:
    """`--lora` and its like, as they were given; without any, everything is trained."""

    lora: int | None = None
    """Rank of the adapters."""
    lora_alpha: float | None = None
    lora_on: str | None = None
    rslora: bool = False
    dora: bool = False
    freeze: str | None = None
    """Parts that are not trained; beside adapters, blocks that have none."""
    lora_blocks: tuple[int, ...] | None = None
    """The only blocks that have adapters, as a file of theirs says; None: all that are not frozen."""
    task: Task | None = None
    """None: what the model is for."""
    loss_share: float | None = None
    """Of the tokens, those that have a loss; None: all, of a masked language model those that are usually hidden."""

    def __post_init__(self) -> None:
        if self.lora is not None and not (is_number(self.lora) and self.lora == int(self.lora)):
            raise FlopwiseError(
                f"adapters cannot be of rank {shown(str(self.lora))}",
                why="a whole number is expected",
                hint="--lora 16",
            )
        if self.lora_alpha is not None and not is_number(self.lora_alpha):
            raise FlopwiseError(
                f"alpha of adapters cannot be {shown(str(self.lora_alpha))}",
                why="a number is expected",
                hint="--lora-alpha 32",
            )
        given = {
            "lora-alpha": self.lora_alpha,
            "lora-on": self.lora_on,
            "rslora": self.rslora or None,
            "dora": self.dora or None,
        }
        for name, value in given.items():
            if value is not None and self.lora is None:
                raise FlopwiseError(
                    f"--{name} without --lora", why="it is about adapters, and there are none", hint="--lora 16"
                )

    def of(self, model: Model) -> Model:
        """The model, of which so much is trained for that task; its name then tells."""
        headed = hide(model) if self.task == "masked" else classify(model) if self.task == "classification" else model
        found = with_loss_share(self._trained(headed), self.loss_share)
        if self.task == "dpo":
            return prefer(found)
        if self.task is not None and self.task != task_of(found):
            raise FlopwiseError(
                f"{model.name} is for another task: {task_of(found)}", hint=f"without --task {self.task}"
            )
        return found

    def _trained(self, model: Model) -> Model:
        if self.lora is None and self.freeze is None:
            return model
        if not isinstance(model, Transformer):
            raise FlopwiseError(
                f"{model.name} is trained as a whole", why="it is no transformer", hint="without --lora and --freeze"
            )
        if model.adapters is not None or model.frozen is not None:
            raise FlopwiseError(
                f"{model.name}: its description says already what is trained", hint="without --lora and --freeze"
            )
        frozen = None if self.freeze is None else parse_frozen(self.freeze)
        named = "" if self.freeze is None else f"+freeze={self.freeze}"
        if self.lora is None:
            return replace(model, frozen=frozen, name=f"{model.name}{named}")
        if self.lora_blocks is not None:
            frozen = blocks_besides(self.lora_blocks, model)
            named = "" if frozen is None else f"+freeze={','.join(frozen)}"
        elif frozen is not None and not frozen_layers(frozen, model.layers):
            raise FlopwiseError(
                f"{model.name}: --freeze {self.freeze} beside --lora",
                why="with adapters everything else is frozen already; blocks that are named have none",
                hint="--freeze blocks.0-15, or without --freeze",
            )
        adapters = Adapters(
            rank=self.lora,
            alpha=ALPHA_PER_RANK * self.lora if self.lora_alpha is None else self.lora_alpha,
            targets=parse_targets(self.lora_on or "all-linear", model),
            rank_stabilised=self.rslora,
            magnitudes=self.dora,
        )
        return replace(model, adapters=adapters, frozen=frozen, name=f"{model.name}+{adapters.label}{named}")


def blocks_besides(adapted: tuple[int, ...], model: Transformer) -> tuple[str, ...] | None:
    """The other blocks than those that have adapters, in the words of `--freeze`; None: there are none."""
    wrong = next((block for block in adapted if not 0 <= block < model.layers), None)
    if wrong is not None or not adapted:
        raise FlopwiseError(
            f"{model.name}: no block {wrong} has adapters" if adapted else f"{model.name}: no block has adapters",
            why=f"there are {model.layers} blocks, 0 to {model.layers - 1}",
            hint="adapters of this model",
        )
    chosen, found = {*adapted}, list[str]()
    for block in (block for block in range(model.layers) if block not in chosen):
        first = block == 0 or block - 1 in chosen
        if first:
            found.append(f"blocks.{block}")
        else:
            found[-1] = f"{found[-1].partition('-')[0]}-{block}"
    return tuple(found) or None


def with_loss_share(model: Model, share: float | None) -> Model:
    """The model, of whose tokens so many have a loss; None: as it is said, or as is usual where tokens are hidden."""
    if not isinstance(model, Transformer):
        if share is not None:
            raise FlopwiseError(
                f"{model.name}: all of its tokens have a loss", why="it is no transformer", hint="without --loss-share"
            )
        return model
    if share is not None:
        return replace(model, loss_share=share)
    hides = model.head == "masked" and model.loss_share == 1
    return replace(model, loss_share=usual_mask_share(model)) if hides else model


def usual_mask_share(model: Transformer) -> float:
    """Of a text's tokens, what is hidden where nobody says: as the model's family was trained."""
    return MASK_SHARES.get(model.family, MASK_SHARE)


def task_of(model: Model) -> Task:
    """What a model is trained for where nobody says."""
    if not isinstance(model, Transformer):
        return "language"
    if model.objective == "preference":
        return "dpo"
    return HEAD_TASKS[model.head]


HEAD_TASKS: dict[str, Task] = {"language": "language", "masked": "masked", "classifier": "classification"}
"""What each head is trained for."""


def prefer(model: Model) -> Transformer:
    """The model as DPO trains it; its name then tells."""
    if isinstance(model, Transformer) and model.objective == "preference":
        return model
    if not isinstance(model, Transformer) or model.head != "language":
        raise FlopwiseError(
            f"{model.name} cannot be trained on preferences",
            why="its answers are compared token by token, and it writes none",
            hint="a decoder, such as qwen3-0.6b",
        )
    if not model.causal:
        raise FlopwiseError(
            f"{model.name} sees what comes after; it cannot prefer one answer to another",
            why="how likely an answer is follows from every token's likelihood after those before it",
            hint="a decoder, such as qwen3-0.6b",
        )
    return replace(model, objective="preference", name=f"{model.name}+dpo")


def hide(model: Model) -> Transformer:
    """The model as masked language modelling trains it; its name then tells where its description had another head."""
    if not isinstance(model, Transformer) or model.causal:
        raise FlopwiseError(
            f"{model.name} reads from left to right; it cannot foretell what is hidden",
            why="a hidden token is foretold from what comes before it and after it",
            hint="an encoder, such as modernbert-base, or --task language",
        )
    if model.head == "masked":
        return model
    # The decoder is the embedding's matrix in every released encoder, with a bias of its own.
    return replace(model, head="masked", labels=None, tied=True, head_bias=True, name=f"{model.name}+masked")


def classify(model: Model) -> Transformer:
    """The model as a classifier; its name then tells where its description had another head."""
    if not isinstance(model, Transformer) or model.causal:
        raise FlopwiseError(
            f"{model.name} reads from left to right; a classifier here is an encoder",
            why="the first token, which is classified, sees nothing but itself",
            hint="bert-base, or --task language",
        )
    # A norm behind the blocks is a part of those whose norms are before the branches.
    normed = model.final_norm and model.norm_place == "pre"
    name = model.name if model.head == "classifier" else f"{model.name}+classifier"
    labels = model.labels or 2
    return replace(model, head="classifier", labels=labels, tied=False, final_norm=normed, loss_share=1.0, name=name)


def parse_alpha(text: str) -> float:
    """A number above zero, as `--lora-alpha` has it."""
    try:
        return float(text)
    except ValueError:
        raise FlopwiseError(f"cannot be {shown(text)}", why="a number is expected", hint="--lora-alpha 32") from None


def trains_partly(model: Model) -> bool:
    """Whether adapters are trained beside a model, or parts of it are frozen."""
    return isinstance(model, Transformer) and (model.adapters is not None or model.frozen is not None)


def adapters_have_magnitudes(model: Model) -> bool:
    """Whether DoRA is trained."""
    return isinstance(model, Transformer) and model.adapters is not None and model.adapters.magnitudes


def trains_in_shards(parallel: Parallel) -> bool:
    """Whether devices differ in their sequences alone, which is how a model that is trained in part is spread."""
    split = (parallel.tensor, parallel.pipeline, parallel.context, parallel.expert)
    return split == (1, 1, 1, 1) and not (parallel.offload_optimizer or parallel.offload_activations)


def check_base(model: Model, base: str | None) -> None:
    """Refuse a format of frozen weights that is none, and any where no weights are frozen."""
    if base is not None:
        check_base_name(base)
    if base is not None and not trains_partly(model):
        raise FlopwiseError(
            f"--base {base} for {model.name}, of which everything is trained",
            why="it is the format of weights that are not",
            hint="--lora 16, or --precision",
        )
