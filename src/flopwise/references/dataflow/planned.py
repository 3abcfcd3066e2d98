"""What the reference's rule chooses for the same caps, as a plan of ours with its forecast."""

from __future__ import annotations

from flopwise.base.errors import DoesNotFit, FlopwiseError
from flopwise.base.units import show_bytes
from flopwise.plan.device.explain import notes
from flopwise.plan.device.forecast import forecast
from flopwise.records.plan import Planned
from flopwise.references.dataflow.rule import RuleChoice, configure, to_plan, variant_of
from flopwise.references.dataflow.sizes import GIB
from flopwise.setup.setup import CappedSetup
from flopwise.work.op import Convention
from flopwise.work.transformer import Transformer


def ruled(setup: CappedSetup, variant: str, *, convention: Convention = "causal") -> Planned:
    """What the reference's rule chooses for the same caps, simulated as it runs."""
    model = setup.model
    if not isinstance(model, Transformer):
        raise FlopwiseError(f"the rule dataflow is for transformers, not {model.name}", hint="--rule flopwise")
    if setup.batch_sequences is not None or setup.clip:
        given, options = ("clipping", "--clip") if setup.clip else ("a batch", "--batch and --batch-tokens")
        raise FlopwiseError(
            f"{given} beside --rule dataflow", why="the rule decides it itself", hint=f"without {options}"
        )
    if (setup.formats.name, setup.optimizer) != ("bf16", "adamw"):
        raise FlopwiseError(
            "the rule dataflow plans AdamW with everything in bf16",
            why="it knows no other formats",
            hint="--precision bf16 --optimizer adamw",
        )
    configuration = _configured(setup, model, variant)
    name = setup.hardware_name or setup.hardware.name
    plan = to_plan(configuration, model, name, setup.device_cap_bytes, setup.host_cap_bytes)
    device, host = show_bytes(configuration.used_device_bytes), show_bytes(configuration.used_host_bytes)
    return Planned(
        model=model.name,
        plan=plan,
        forecast=forecast(plan, model, setup.hardware, convention=convention),
        reasons={"rule": f"dataflow as of {variant_of(variant).date}; nothing was searched"},
        notes=(
            *notes(model, setup.hardware, setup.sequence_tokens),
            f"the rule itself counts {device} of device and {host} of host memory",
        ),
    )


def _configured(setup: CappedSetup, model: Transformer, variant: str) -> RuleChoice:
    try:
        return configure(
            model,
            setup.hardware,
            sequence_tokens=setup.sequence_tokens,
            device_bytes=setup.device_cap_bytes,
            host_bytes=setup.host_cap_bytes,
            variant=variant_of(variant),
        )
    except DoesNotFit as error:
        hinted = -(-(error.needed_bytes or 0) // GIB) * GIB
        if error.place == "device" and hinted > setup.hardware.device.dram.size_bytes.value:
            # More than the device has is no hint.
            error.hint = "a shorter --seq, or --rule flopwise"
        raise
