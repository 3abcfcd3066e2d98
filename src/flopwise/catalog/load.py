"""Names to descriptions: the catalogue that ships with flopwise, a file of your own, a Hugging Face configuration."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flopwise.base.errors import FlopwiseError, shown, unknown_name
from flopwise.base.files import decode, entry_kind, plain, read_table
from flopwise.catalog.hub import find_snapshot, is_hub_name
from flopwise.records.evidence import Evidence, EvidenceBook
from flopwise.setup.hardware import Hardware
from flopwise.setup.power import at_power
from flopwise.setup.stack import NO_STACK, Stack
from flopwise.work.attention_kinds import OtherAttention, RotaryScaling
from flopwise.work.lstm import Lstm
from flopwise.work.model import ARCHITECTURES, Model
from flopwise.work.routing import Routing
from flopwise.work.transformer import Transformer

if TYPE_CHECKING:
    from flopwise.records.cluster_plan import ClusterPlan
    from flopwise.records.plan import Plan

ROOT = Path(__file__).parent
THIS_MACHINE = "this-machine"
THIS_CPU = "this-cpu"
"""Names of hardware that is measured where we run instead of read from a file."""


@cache
def model_names() -> tuple[str, ...]:
    """Every model of the catalogue, sorted."""
    return tuple(sorted(path.stem for path in (ROOT / "models").glob("*.toml")))


@cache
def hardware_names() -> tuple[str, ...]:
    """Every device of the catalogue, sorted."""
    return tuple(sorted(path.stem for path in (ROOT / "hardware").glob("*.toml")))


@cache
def stack_names() -> tuple[str, ...]:
    """Every training framework of the catalogue, sorted."""
    return tuple(sorted(path.stem for path in (ROOT / "stacks").glob("*.toml")))


@cache
def technology_names() -> tuple[str, ...]:
    """Every technology that hardware can be designed in, sorted."""
    return tuple(sorted(path.stem for path in (ROOT / "technology").glob("*.toml")))


POWER = re.compile(r"(.+)@(\d{1,5}(?:\.\d+)?)\s*[wW]")
"""A card and its power limit."""


def technology_file(name: str) -> Path:
    """The file of a technology of the catalogue, or the one that a path names."""
    if name.lower() in technology_names():
        return ROOT / "technology" / f"{name.lower()}.toml"
    if _is_path(name):
        return Path(name)
    example = technology_names()[0]
    raise unknown_name(
        "technology",
        name,
        technology_names(),
        hint=f"the path of a TOML that describes it (`flopwise show {example}` prints one)",
    )


def load_model(name: str | Path, changes: Mapping[str, Any] | None = None) -> Model:
    """A model by catalogue name, by the path of a TOML or JSON file, or by a Hugging Face config.json or its folder.

    `changes` replace fields of the description before it is checked; the model's name then tells them.
    """
    if isinstance(name, str):
        if name.lower() in model_names():
            return _decode_model(read_table(ROOT / "models" / f"{name.lower()}.toml"), name.lower(), changes)
        if not _is_path(name):
            if name.lower() not in model_aliases():
                raise _no_model(name)
            return load_model(model_aliases()[name.lower()], changes)
        if is_hub_name(name):
            return load_hub_model(name, changes)
        if "://" in name:
            raise FlopwiseError(
                f"{shown(name)} is an address, not a model",
                why="nothing is fetched from the network",
                hint="the hub's name of it, as Qwen/Qwen3-8B, or the path of a config.json",
            )
    path = description_file(Path(name))
    return _decode_model(read_table(path), str(path), changes)


def model_from_table(table: dict[str, Any], where: str) -> Model:
    """A model of what a file holds, be it ours or a `config.json`, that is said to stand there."""
    return _decode_model(table, where, None)


def load_hub_model(name: str, changes: Mapping[str, Any] | None) -> Model:
    """A model of the hub that was fetched, under its own name instead of its snapshot's; else the catalogue's of it."""
    try:
        path = find_snapshot(name) / "config.json"
    except FlopwiseError:
        known = model_aliases().get(name.lower())
        if known is None:
            raise
        told = f"{name} was not fetched from the hub: it is described by {known} of the catalogue"
        listed = load_model(known, changes)
        return replace(listed, note="; ".join(filter(None, [told, listed.note])))
    found = _decode_model(read_table(path), str(path), None)
    named = replace(found, name=name.rpartition("/")[2].lower(), title=name)
    return _decode_model(model_table(named), name, changes) if changes else named


OTHER_NAMES = ("hub", "aliases")
"""Keys of a catalogue's model beside its description: what the hub calls it, and other names."""


@cache
def model_aliases() -> dict[str, str]:
    """Name of the hub, or another one, in small letters → catalogue name. Read only where a name is not its own."""
    return {
        other.lower(): name
        for name in model_names()
        for key in OTHER_NAMES
        for other in read_table(ROOT / "models" / f"{name}.toml").get(key, ())
    }


def model_folder(name: str) -> Path | None:
    """The folder that a model's name means, where its weights may lie; None: a name of the catalogue."""
    if is_hub_name(name):
        return find_snapshot(name)
    path = Path(name)
    if path.is_dir():
        return path
    return path.parent if name.endswith((".json", ".toml")) else None


def _no_model(name: str) -> FlopwiseError:
    device = hardware_aliases().get(name.lower(), name.lower())
    if device in (*hardware_names(), THIS_CPU, THIS_MACHINE):
        return FlopwiseError(
            f"{name!r} is hardware, not a model",
            why="the model comes first, the hardware after --on",
            hint=f"`flopwise predict llama-3-8b --on {device}`",
        )
    known = (*model_names(), *(other for other in model_aliases() if "/" not in other))
    return unknown_name("model", name, known, hint="`flopwise ls models`, or the path of a config.json or TOML")


def load_hardware(name: str | Path) -> Hardware:
    """A device by catalogue name or alias, or by the path of a TOML or JSON file; `h100-sxm@500W` has a power limit."""
    if isinstance(name, str):
        lowered, (card, watts) = name.lower(), split_power(name)
        if watts is not None:
            return at_power(load_hardware(card), watts)
        if lowered in hardware_names():
            return _catalogued_hardware(lowered)
        if not _is_path(name):
            aliases = hardware_aliases()
            if lowered not in aliases:
                raise _no_hardware(name)
            return load_hardware(aliases[lowered])
    path = _hardware_file(Path(name))
    table = read_table(path)
    if "architecture" in table or "model_type" in table:
        raise FlopwiseError(
            f"{path} describes a model, not hardware",
            why="the model comes first, the hardware after --on",
            hint=f"`flopwise predict {name} --on h100-sxm`",
        )
    if any(key in table for key in ("technology", "tech_param", "power_breakdown")):
        raise _not_built(str(path))
    return decode(table, Hardware, str(path))


def split_power(name: str) -> tuple[str, float | None]:
    """A card's name and the watts that it is limited to, if any."""
    found = POWER.fullmatch(name)
    return (found[1], float(found[2])) if found else (name, None)


@cache
def _catalogued_hardware(name: str) -> Hardware:
    """Read once: every cell of a sweep asks for it."""
    return decode(read_table(ROOT / "hardware" / f"{name}.toml"), Hardware, name)


def hardware_place(name: str) -> str:
    """A name of hardware for a file that may be read elsewhere: a path in full, a catalogue's name as it is."""
    word = catalogue_word(name)
    return (
        word if word in (*hardware_names(), THIS_CPU, THIS_MACHINE) or not _is_path(name) else str(Path(name).resolve())
    )


def catalogue_word(name: str) -> str:
    """Hardware as the catalogue calls it, whatever its alias or its capitals; a path as it is."""
    word, (card, watts) = name.lower(), split_power(name)
    if watts is not None:
        return f"{catalogue_word(card)}@{watts:g}W"
    if word in (*hardware_names(), THIS_CPU, THIS_MACHINE):
        return word
    return name if _is_path(name) else hardware_aliases().get(word, name)


def is_cpu(name: str) -> bool:
    """Whether hardware is a CPU: this one, or that of a file; one that cannot be read is refused where it is used."""
    if name in (THIS_CPU, THIS_MACHINE):
        return name == THIS_CPU
    try:
        return load_hardware(name).device.kind == "cpu"
    except FlopwiseError:
        return False


def _hardware_file(path: Path) -> Path:
    """The file that a path of hardware stands for; a model's folder is told from others by what is in it."""
    kind = entry_kind(path)
    if kind == "folder" and entry_kind(path / "config.json") == "nothing":
        raise FlopwiseError(
            f"{path} is a folder, not hardware",
            why=_guess_file(str(path)) or "hardware is a name of the catalogue or a TOML file",
            hint="`flopwise ls hardware`, or the file that `flopwise calibrate` has written",
        )
    meant = _guess_file(str(path)) if kind == "nothing" else None
    if meant:
        raise FlopwiseError(f"there is no file {path}", why=meant, hint=f"--on {path}.toml")
    return description_file(path)


def _guess_file(name: str) -> str | None:
    """The file that is probably meant, where only its ending was left out."""
    return f"did you mean {name}.toml?" if entry_kind(Path(f"{name}.toml")) == "file" else None


def _not_built(name: str) -> FlopwiseError:
    return FlopwiseError(
        f"{name} is a technology, not hardware",
        why="what is built in it depends on how its power is shared out",
        hint=f"`flopwise design llama-3-8b --technology {name} -w device.toml`, then --on device.toml",
    )


def _no_hardware(name: str) -> FlopwiseError:
    if name.lower() in model_names():
        return FlopwiseError(
            f"{name!r} is a model, not hardware",
            why="the model comes first, the hardware after --on",
            hint=f"`flopwise predict {name.lower()} --on h100-sxm`",
        )
    if name.lower() in technology_names():
        return _not_built(name.lower())
    card, at, limit = name.rpartition("@")
    if at and catalogue_word(card) in hardware_names():
        return FlopwiseError(
            f"{shown(name)}: {shown(limit) if limit else 'nothing'} is no power limit",
            why="what follows the @ are watts of one card",
            hint=f"{card}@500W",
        )
    meant = _guess_file(name)
    if meant:
        return FlopwiseError(f"no hardware is called {shown(name)}", why=meant, hint=f"--on {name}.toml")
    return unknown_name(
        "hardware",
        name,
        {*hardware_names(), *hardware_aliases(), THIS_CPU, THIS_MACHINE},
        hint="`flopwise ls hardware`, or the path of a TOML that describes it (`flopwise show h100-sxm` prints one)",
    )


def load_stack(name: str | Path) -> Stack:
    """A training framework by catalogue name or alias, or by the path of a TOML or JSON file."""
    if isinstance(name, str):
        lowered = stack_aliases().get(name.lower(), name.lower())
        if lowered in stack_names():
            return _few(decode(read_table(ROOT / "stacks" / f"{lowered}.toml"), Stack, lowered))
        if not _is_path(name):
            raise _no_stack(name)
    table = read_table(Path(name))
    for key, kind in (("architecture", "a model"), ("model_type", "a model"), ("device", "hardware")):
        if key in table:
            raise FlopwiseError(
                f"{name} describes {kind}, not a training framework",
                hint="`flopwise ls stacks`, or a file like the one that `flopwise show torchtitan` prints",
            )
    return _few(decode(table, Stack, str(name)))


def _few(stack: Stack) -> Stack:
    stack.check_few()
    return stack


def measured_stack(stack: Stack | None) -> str:
    """The name that measurements go by: a file of one's own is another framework, whatever it is called."""
    if stack is None:
        return NO_STACK
    known = stack.name in stack_names() and load_stack(stack.name) == stack
    return stack.name if known else f"{stack.name} of a file"


def _no_stack(name: str) -> FlopwiseError:
    hint = "`flopwise ls stacks`, or the path of a TOML that describes it (`flopwise show torchtitan` prints one)"
    for kind, names in (("a model", model_names()), ("hardware", (*hardware_names(), *hardware_aliases()))):
        if name.lower() in names:
            return FlopwiseError(f"{name!r} is {kind}, not a training framework", hint=hint)
    return unknown_name("stack", name, {*stack_names(), *stack_aliases()}, hint=hint)


def load_description(name: str) -> Model | Hardware | Stack:
    """A model, a device or a training framework, whichever the name or the file describes."""
    lowered = name.lower()
    if _is_model_name(lowered):
        return load_model(name)
    if lowered in hardware_names():
        return load_hardware(name)
    if lowered in stack_names():
        return load_stack(name)
    if _is_path(name):
        return load_model(name) if is_hub_name(name) else _description_in(description_file(Path(name)))
    if lowered in hardware_aliases():
        return load_hardware(name)
    if lowered not in stack_aliases():
        known = (*model_names(), *hardware_names(), *stack_names(), THIS_CPU, THIS_MACHINE)
        hint = "`flopwise ls models`, `flopwise ls hardware` or `flopwise ls stacks`"
        raise unknown_name("model, hardware or stack", name, known, hint=hint)
    return load_stack(name)


def _is_model_name(name: str) -> bool:
    """Whether the catalogue has a model under this name, or under another; the others are read last."""
    if name in model_names() or _is_path(name) or name in (*hardware_names(), *stack_names()):
        return name in model_names()
    return name in model_aliases()


def _description_in(path: Path) -> Model | Hardware | Stack:
    table = read_table(path)
    if "constants" in table:
        return load_stack(path)
    return load_hardware(path) if "device" in table else load_model(path)


@cache
def load_evidence() -> tuple[Evidence, ...]:
    """How far measured steps lay from held-out predictions, table by table."""
    return decode(read_table(ROOT / "evidence.toml"), EvidenceBook, "evidence").entries


@cache
def stack_aliases() -> dict[str, str]:
    """Alias → catalogue name of a training framework."""
    return {
        alias.lower(): name
        for name in stack_names()
        for alias in read_table(ROOT / "stacks" / f"{name}.toml").get("aliases", ())
    }


@cache
def hardware_aliases() -> dict[str, str]:
    """Alias → catalogue name. Read only when a name is not the catalogue's own, since it opens every file."""
    return {
        alias.lower(): name
        for name in hardware_names()
        for alias in read_table(ROOT / "hardware" / f"{name}.toml").get("aliases", ())
    }


def _is_path(name: str) -> bool:
    """Whether a file or folder is meant; one that happens to be called like a device's alias is not."""
    if "/" in name or name.endswith((".toml", ".json")) or name in (".", ".."):
        return True
    return name != "" and entry_kind(Path(name)) != "nothing" and name.lower() not in hardware_aliases()


def description_file(path: Path) -> Path:
    """The file that a path stands for: a folder stands for the Hugging Face configuration in it."""
    if entry_kind(path) != "folder":
        return path
    if entry_kind(path / "config.json") == "nothing":
        raise FlopwiseError(f"the folder {path} holds no config.json", hint="name the file itself, or another folder")
    return path / "config.json"


def plan_table(plan: Plan | ClusterPlan, model: Model) -> dict[str, Any]:
    """A plan as the table of a file, the model's description within."""
    return {**plain(plan), "model": model_table(model)}


def is_plan(name: str) -> bool:
    """Whether a name is that of a file with a plan in it."""
    if not name.endswith(".toml") or entry_kind(Path(name)) != "file":
        return False
    return _is_plan_table(read_table(Path(name)))


def _is_plan_table(table: Mapping[str, Any]) -> bool:
    """Whether a table is a plan's: for several devices it says how they share the work, for one what is saved."""
    return "model" in table and bool({"parallel", "saves"} & set(table))


def load_plan(path: Path) -> tuple[Plan | ClusterPlan, Model]:
    """A plan that was written to a file, and the model that it is for."""
    table = read_table(path)
    described = table.pop("model", None)
    if not isinstance(described, dict) or not {"parallel", "saves"} & set(table):
        raise FlopwiseError(
            f"{path} is not a plan",
            why="it needs a [model], and [parallel] or `saves`",
            hint="`flopwise plan … -w plan.toml`",
        )
    model = _decode_model(described, str(path), None)
    # Here: of those who look names up, few have a plan.
    if "parallel" in table:
        from flopwise.records.cluster_plan import ClusterPlan

        return replace(decode(table, ClusterPlan, str(path)), model=model.name), model
    from flopwise.records.plan import Plan

    return replace(decode(table, Plan, str(path)), model=model.name), model


def model_table(model: Model) -> dict[str, Any]:
    """A model as the table of a file. Sizes that follow from others stay out, so that a change moves them along."""
    table = {"architecture": "lstm" if isinstance(model, Lstm) else "transformer", **plain(model)}
    if isinstance(model, Transformer):
        if model.kv_heads == model.heads:
            del table["kv_heads"]
        if model.head_dim * model.heads == model.hidden:
            del table["head_dim"]
        table = _without_defaults(table, model, OF_SOME_FAMILIES)
        if (attention := model.other_attention) is not None:
            table["other_attention"] = _without_defaults(table["other_attention"], attention, ("qk_norm",))
        if "routing" in table:
            table["routing"] = _without_defaults(table["routing"], model.routing, OF_SOME_ROUTINGS)
        if (scaling := model.rotary_scaling) is not None:
            table["rotary_scaling"] = _without_defaults(table["rotary_scaling"], scaling, OF_SOME_SCALINGS)
            if scaling.method in ("linear", "llama3"):
                table["rotary_scaling"].pop("method", None)
    return table


OF_SOME_FAMILIES = (
    *(
        "norm_adds_one",
        "qk_norm_over",
        "qk_norm_weights",
        "shared_norm",
        "rotary_pairs",
        "other_blocks",
        "embedding_scale",
    ),
    *("residual_scale", "logit_scale", "family", "routing", "sinks", "latent", "objective"),
    "loss_share",
    *("shared_ffn", "shared_gate", "dense_blocks", "dense_ffn"),
    *("unnormed_attention", "pooling", "pooler_norm", "transform_bias"),
    *("attention_gate", "recurrence", "recurrent_blocks", "one_branch", "feed_blocks"),
)
"""Fields of a transformer that stand in a file only where a model has them."""
OF_BLOCKS = {
    "other_blocks": ("other_attention",),
    "dense_blocks": ("dense_ffn",),
    "recurrent_blocks": ("recurrence",),
    "feed_blocks": (),
}
"""Lists of blocks, and what is described for those that are in them alone."""
NESTED = ("routing", "dropout", "latent", "rotary_scaling", "other_attention", "recurrence")
"""Fields of a transformer whose own fields a change may name: `routing.balance`."""
OF_SOME_ROUTINGS = ("balance", "balance_over", "z_loss")
OF_SOME_SCALINGS = ("beta_fast", "beta_slow", "truncate", "short_factors", "long_factors")


def _without_defaults(
    table: dict[str, Any], described: Transformer | RotaryScaling | Routing | OtherAttention, names: Collection[str]
) -> dict[str, Any]:
    usual = {item.name: item.default for item in dataclasses.fields(described)}
    left_out = {name for name in names if getattr(described, name) == usual[name]}
    return {key: value for key, value in table.items() if key not in left_out}


def _decode_model(table: dict[str, Any], where: str, changes: Mapping[str, Any] | None) -> Model:
    if "model_type" in table and "architecture" not in table:
        from flopwise.catalog.huggingface import from_config

        try:
            found = from_config(table, _configuration_name(where))
        except FlopwiseError as error:
            raise error.within(where) from None
        if not changes:
            return found
        table = model_table(found)
    architecture = table.get("architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise _no_description(table, where)
    # A copy of the catalogue's file is a description too.
    fields = {key: value for key, value in table.items() if key not in ("architecture", *OTHER_NAMES)}
    model = decode(_changed(_with_layers(fields, changes or {}), changes or {}), ARCHITECTURES[architecture], where)
    if isinstance(model, Transformer) and model.experts and not model.mixed_blocks:
        raise FlopwiseError(
            f"{model.name}: none of its blocks has experts",
            why=f"of its {model.layers}, each with one branch, none is a feed-forward part",
            hint="more layers, or leave out `experts` and what is described beside them",
        )
    return _rename(model, changes or {})


def _with_layers(fields: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """With fewer layers, lists of blocks end where these do, unless they are given anew."""
    layers = changes.get("layers")
    if type(layers) is not int:
        return fields
    found = dict(fields)
    for listed, beside in OF_BLOCKS.items():
        blocks = fields.get(listed)
        if listed in changes or not isinstance(blocks, list | tuple):
            continue
        found[listed] = [block for block in blocks if not isinstance(block, int) or block < layers]
        if not found[listed]:
            found = {key: value for key, value in found.items() if key not in (listed, *beside)}
    return found


def _changed(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """With `routing.balance` a field of a field is changed, and the others stay."""
    found = {**fields, **{key: value for key, value in changes.items() if "." not in key}}
    for key, value in changes.items():
        field, dot, inner = key.partition(".")
        if not dot:
            continue
        before = found.get(field, {})
        if not isinstance(before, dict) or field not in NESTED:
            # The check of the keys tells of it.
            found[key] = value
        else:
            found[field] = {**before, inner: value}
    return found


def _no_description(table: dict[str, Any], where: str) -> FlopwiseError:
    if _is_plan_table(table):
        return FlopwiseError(
            f"{where} is a plan, not a model", why="a plan is predicted by itself", hint=f"`flopwise predict {where}`"
        )
    if "device" in table:
        return FlopwiseError(
            f"{where} describes hardware, not a model",
            why="the model comes first, the hardware after --on",
            hint=f"`flopwise predict llama-3-8b --on {where}`",
        )
    why = "it has neither `architecture` (ours) nor `model_type` (Hugging Face)"
    if "architecture" in table:
        why = f"architecture is {shown(table['architecture'])}"
    return FlopwiseError(
        f"{where}: this is not the description of a model",
        why=why,
        hint=f"architecture = {' or '.join(ARCHITECTURES)}; `flopwise show llama-3-8b` prints one",
    )


def _rename(model: Model, changes: Mapping[str, Any]) -> Model:
    """`llama-3-8b+layers=2`: a changed model must not pass for the one that it was made from."""
    told = {key: value for key, value in changes.items() if key not in ("title", "source", "note")}
    if not told or "name" in told:
        return model
    words = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in told.items()]
    return replace(model, name="+".join([model.name, *words]))


def _configuration_name(where: str) -> str:
    """`…/mistral-7b/config.json` is called mistral-7b; a bare config.json goes by its own name."""
    path = Path(where).absolute()
    return path.parent.name if path.name == "config.json" and path.parent.name else path.stem
