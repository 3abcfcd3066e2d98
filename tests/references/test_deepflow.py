"""The reference model against its own published print-out and table, and its formulas for several devices by hand."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import ROOT, load_model
from flopwise.references.deepflow import (
    PUBLISHED,
    Configuration,
    DeepflowParallel,
    Split,
    for_model,
    from_table,
    printout,
    run,
    step_s,
    summary,
)
from flopwise.references.deepflow.kernels import DRAM_LATENCY_S, Kernels
from flopwise.work.lstm import Lstm

SEED = (Path(__file__).parents[1] / "data" / "deepflow_seed.txt").read_text()
with (ROOT / "tables" / "deepflow_lstm.csv").open() as stream:
    ROWS = list(csv.DictReader(stream))
GIBI = 2**30

YAML: dict[str, dict[str, Any]] = {
    "model_param": {
        "batch_size": 512,
        "vocab_size": 800000,
        "num_layers": 2,
        "layer_size": 19968,
        "projection": 2048,
        "seq_len": 20,
        "num_gates": 4,
        "num_non_linear": 5,
        "num_add": 8,
    },
    "arch_param": {"kernel_launch_overhead": "37e-6", "precision": 4},
    "tech_param": {
        "DRAM_energy_per_bit_trans": "6e-12",
        "L2_energy_per_bit": 5e-15,
        "shared_mem_energy_per_bit": "1e-15",
        "core_energy_per_flop": "119e-13",
        "internode_energy_per_bit": "10e-12",
        "HBM_stack_capacity": "4 GB",
        "HBM_stack_bw": "225 GB/s",
        "L2_bank_capacity": "32 KB",
        "L2_bank_bw": "4000GB/s",
        "shared_mem_bank_capacity": 32768,
        "shared_mem_bank_bw": "4000 GiB/s",
        "line_latency": "16e-7",
    },
    "power_breakdown": {
        "TDP": 300,
        "core": 0.2592,
        "DRAM": 0.2592,
        "L2": 0.16896000000000005,
        "shared_mem": 0.20275200000000007,
        "IB": 0.2,
    },
    "scheduling_param": {"auto": False, "topology": "ring", "dp": 1, "kp_hidden_dim1": 1, "kp_hidden_type": -1},
}


def spread(**parallel: Any) -> Configuration:
    return replace(PUBLISHED, parallel=DeepflowParallel(**parallel))


def column_row(ways: int) -> Split:
    return Split(kind="column-row", first=ways)


def row_column(first: int, second: int) -> Split:
    return Split(kind="row-column", first=first, second=second)


def test_the_seed_is_printed_character_by_character() -> None:
    # The published searches append a goal of theirs, which is no prediction.
    printed, goal, _ = SEED.partition("time_per_step: ")
    assert goal
    assert printout(run(PUBLISHED)) == printed


def test_the_short_form_is_the_end_of_the_long_one() -> None:
    result = run(PUBLISHED)
    assert printout(result).endswith(summary(result))
    assert summary(result).startswith("#Parameters: 38.37 Billion\n")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["path"].split("/")[-2])
def test_every_published_row_is_met_to_its_last_digit(row: dict[str, str]) -> None:
    result = run(from_table(row))
    printed = {
        "time_s": f"{result.time_s:.8f}",
        "params_b": f"{result.parameters / 1e9:.2f}",
        "tflops": f"{result.machine.flops_per_s / 0.7 / 1e12:.1f}",
        "mem_gbs": f"{result.machine.dram_bytes_per_s / 0.7 / GIBI:.1f}",
        "total_mem_gb": f"{result.data_shard.total / GIBI:.1f}",
        "overflow": f"{result.data_shard_overflow:.1f}",
    }
    assert printed == {name: row[name] for name in printed}


def test_there_are_256_published_rows() -> None:
    assert len(ROWS) == 256


def test_sections_units_and_words_are_read_as_the_reference_does() -> None:
    assert from_table(YAML) == PUBLISHED
    assert from_table({name: value for section in YAML.values() for name, value in section.items()}) == PUBLISHED


def test_a_table_changes_a_base() -> None:
    found = from_table({"core": "0.3", "dp": 4, "kp_softmax_type": 1, "kp_softmax_dim1": 2}, PUBLISHED)
    assert found.power == replace(PUBLISHED.power, core=0.3)
    assert found.parallel == DeepflowParallel(data=4, softmax=column_row(2))
    assert found.technology == PUBLISHED.technology


def test_line_latency_is_that_of_messages_alone() -> None:
    slow = replace(PUBLISHED.technology, line_latency_s=1e-3)
    assert step_s(replace(PUBLISHED, technology=slow)) == step_s(PUBLISHED)
    two = spread(data=2)
    # Two rounds for the hidden gradients and two for the embedding's rows.
    difference = step_s(replace(two, technology=slow)) - step_s(two)
    assert difference == pytest.approx(4 * (1e-3 - 16e-7))


def test_without_an_l2_operands_are_loaded_once() -> None:
    """Figures of the published run with an L2 share of −0.0868."""
    power = replace(PUBLISHED.power, core=0.5184, dram=0.5184, l2=-0.08680000000000003, shared=0.05)
    text = printout(run(replace(PUBLISHED, power=power)))
    for line in (
        "Cf GEMM_flop: 3,274,910,466,048, GEMM_gmem: 13,004,439,552, GEMM_l2mem: 19,302,187,008",
        "softmax_f GEMM_time: 35.86463617695474",
        "L2 Bandwidth: -592.1 TB/s",
        "L2 Size: -4.7 MB",
        "Time: 151.63529539",
    ):
        assert f"{line}\n" in text
    assert "gmem: reload_AB: {}, reload_AC: {}, reload_BC: {}\n 1 1 1\n" in text


def test_a_faster_transpose_is_told_with_the_straight_time() -> None:
    """Shallow and tall, bound by bytes: straight, the right operand comes for every tile of rows."""
    starved = replace(PUBLISHED, power=replace(PUBLISHED.power, dram=0.0005))
    cost = Kernels(starved).product("tall", 4096, 64, 8)
    straight_s = cost.lines[-1].values[-1]
    assert isinstance(straight_s, float)
    assert cost.seconds < straight_s
    text = printout(replace(run(starved), lines=cost.lines))
    assert f"tall GEMM_flop_t: 4,849,664, GEMM_gmem_t: 1,181,696\ntall GEMM_time_t: {straight_s}\n" in text


def test_data_parallel_devices_sum_in_a_ring() -> None:
    result = run(spread(data=4))
    one, machine, technology = run(PUBLISHED), result.machine, PUBLISHED.technology
    assert machine.network_bytes_per_s == pytest.approx(0.2 * 300 / (4 * 80e-12))
    elements = 2 * 19968 * 4 * 19968
    message = 4 * elements / 4 / machine.network_bytes_per_s + technology.line_latency_s
    local = 3 * 4 * elements / 4 / machine.dram_bytes_per_s + DRAM_LATENCY_S + technology.launch_s
    expected = 6 * message + 3 * local + one.times.hidden_update_s
    assert result.times.hidden_update_s == pytest.approx(expected)
    assert result.times.cell_forward_s < one.times.cell_forward_s
    assert result.parameters == one.parameters
    assert result.device.hidden.weight == one.device.hidden.weight
    assert result.device.hidden.activation == one.device.hidden.activation / 4


def test_column_row_shares_the_depth_and_scatters_the_sum() -> None:
    configuration = spread(hidden=column_row(4))
    kernels, model = Kernels(configuration), PUBLISHED.model
    result, network = run(configuration), kernels.machine.network_bytes_per_s
    width = 4 * model.hidden
    product = kernels.product("", 512, 2 * model.hidden / 4, width).seconds
    rounds = 3 * (4 * 512 * width / 4 / network + PUBLISHED.technology.line_latency_s)
    local = 3 * (kernels.roofline(512 * width / 4, 3 * 512 * width).seconds + PUBLISHED.technology.launch_s)
    elements = 512 * width / 4
    points = kernels.roofline(4 * elements, 11 * 4 * elements).seconds + PUBLISHED.technology.launch_s
    expected = product + rounds + local + points + 3 * elements / network
    assert result.times.cell_forward_s == pytest.approx(expected)
    # The gathering of the backward pass is counted twice.
    products = kernels.product("", 2 * model.hidden / 4, 512, width).seconds
    products += kernels.product("", 512, width, 2 * model.hidden / 4).seconds
    expected = products + 2 * rounds + points + 3 * elements / network
    assert result.times.cell_backward_s == pytest.approx(expected)
    assert result.device.hidden.weight == (2 * model.hidden / 4 + 1) * width * 2 * 4


def test_row_column_shares_rows_and_columns_and_gathers() -> None:
    configuration = spread(softmax=row_column(2, 4))
    kernels, model = Kernels(configuration), PUBLISHED.model
    network, latency, launch = kernels.machine.network_bytes_per_s, 16e-7, 37e-6
    tokens, vocab, depth = 512 * 20, model.vocab, model.projection
    product = kernels.product("", tokens / 2, depth, vocab / 4).seconds
    gather = 3 * (4 * tokens / 2 * vocab / 4 / network + latency)
    elements = tokens / 2 * vocab / 4
    points = kernels.roofline(3 * elements, 7 * 4 * elements).seconds + launch + 4 * tokens / 2 * 4 / network
    result = run(configuration)
    assert result.times.softmax_forward_s == pytest.approx(product + gather + points)
    assert result.device.softmax.total == pytest.approx(4 * (3 * elements + tokens / 2 + (depth + 1) * vocab / 4))


def test_layers_in_groups_run_as_a_wavefront() -> None:
    result = run(spread(layer=2, hidden_layer=2))
    times, one = result.times, run(PUBLISHED)
    around = one.time_s - (40 * (one.times.cell_forward_s + one.times.cell_backward_s) + one.times.hidden_update_s)
    assert times.message_s == pytest.approx(4 * 512 * 19968 / result.machine.network_bytes_per_s)
    assert times.message_s < times.cell_forward_s
    cells = (2 + 19) * (times.cell_forward_s + times.cell_backward_s)
    assert result.time_s == pytest.approx(around + cells + 2 * times.message_s + times.hidden_update_s)
    assert result.device.hidden.total == one.device.hidden.total / 2


def test_slow_messages_hide_the_cells() -> None:
    slow = replace(PUBLISHED.power, network=5e-6)
    configuration = replace(spread(layer=2, hidden_layer=2), power=slow)
    times = run(configuration).times
    assert times.message_s > times.cell_backward_s
    fast = run(replace(configuration, power=PUBLISHED.power))
    cells = (2 + 19) * (times.cell_forward_s + times.cell_backward_s) + 2 * fast.times.message_s
    expected = fast.time_s - cells + 2 * (times.cell_forward_s + times.cell_backward_s) + 40 * times.message_s
    assert run(configuration).time_s == pytest.approx(expected)


def test_an_update_longer_than_a_cell_is_exposed_once_a_layer() -> None:
    small = replace(PUBLISHED.model, batch_sequences=1)
    result = run(replace(PUBLISHED, model=small, parallel=DeepflowParallel()))
    times = result.times
    assert times.cell_backward_s < times.hidden_update_s
    around = times.softmax_forward_s + times.softmax_backward_s + times.softmax_update_s
    around += times.embedding_forward_s + times.embedding_backward_s
    cells = 40 * times.cell_forward_s + 39 * times.cell_backward_s
    assert result.time_s == pytest.approx(around + cells + 2 * times.hidden_update_s)


@pytest.mark.parametrize(
    "parallel",
    [
        {"data": 8},
        {"layer": 4, "hidden_layer": 2},
        {"hidden": column_row(4), "softmax": column_row(8), "projection": column_row(2), "embedding": column_row(2)},
        {"hidden": row_column(2, 4), "softmax": row_column(1, 8), "projection": row_column(4, 2)},
        {"data": 2, "layer": 2, "hidden_layer": 2, "hidden": row_column(4, 1), "embedding": row_column(2, 2)},
    ],
    ids=["data", "layer", "column-row", "row-column", "all"],
)
def test_any_strategy_is_printed_whole(parallel: dict[str, Any]) -> None:
    result = run(spread(**parallel))
    text = printout(result)
    assert math.isfinite(result.time_s) and result.time_s > 0
    assert result.machine.network_bytes_per_s > 0
    assert text.count("inflection_point") == text.count("comp_int")
    assert f"dp: {parallel.get('data', 1)}, lp: {parallel.get('layer', 1)}, " in text
    assert text.endswith(f"Time: {result.time_s:.8f}\n")
    if "data" in parallel:
        assert "(gr) allReduce_flop" in text


def test_a_tiny_reduction_takes_its_bytes_for_seconds() -> None:
    kernels = Kernels(spread(data=2))
    assert kernels.reduction(2, 3, 2, sums=False).seconds == 24


def test_a_model_of_the_catalogue_takes_the_published_place() -> None:
    model = load_model("lstm-lm")
    assert isinstance(model, Lstm)
    assert for_model(PUBLISHED, model) == PUBLISHED
    assert for_model(PUBLISHED, model, batch_sequences=64, sequence_tokens=10).model.sequence_tokens == 10
    with pytest.raises(FlopwiseError, match="no projection"):
        for_model(PUBLISHED, replace(model, projection=0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"core": 0}, "core must be a positive number"),
        ({"core": float("nan")}, "core must be a positive number"),
        ({"L2": 1.5}, "l2 = 1.5 is not a share"),
        ({"shared_mem": -0.1}, "shared must be a positive number"),
        ({"TDP": "much"}, "TDP: cannot read 'much'"),
        ({"TDP": True}, "TDP: cannot read true"),
        ({"HBM_stack_capacity": "4 GB/s"}, "HBM_stack_capacity: cannot read"),
        ({"HBM_stack_bw": "4 GB"}, "HBM_stack_bw: cannot read"),
        ({"batch_size": 1.5}, "batch_size must be a whole number"),
        ({"batch_size": float("inf")}, "batch_size must be a whole number"),
        ({"batch_size": 0}, "batch_sequences must be a whole number of at least 1"),
        ({"cores": 0.1}, "there is no setting 'cores'"),
        ({"tech": {}}, "there is no section 'tech'"),
        ({"auto": "greedy"}, "auto = 'greedy' is not supported"),
        ({"topology": "tree"}, "topology = 'tree' is not modelled"),
        ({"dp": 1024}, "1024 data-parallel devices cannot share 512"),
        ({"hlp": 3}, "2 layers cannot form 3 groups"),
        ({"dp": 2, "IB": 0}, "several devices need a network"),
        ({"kp_hidden_type": 3}, "kp_hidden_type = 3"),
        ({"kp_hidden_dim1": 4}, "kp_hidden: a split of 4 × 1 has no type"),
        ({"kp_hidden_type": 1}, "kp_hidden: a column-row split of 1 × 1"),
        ({"kp_hidden_type": 2}, "kp_hidden: a row-column split of 1 × 1"),
        ({"kp_hidden_type": 1, "kp_hidden_dim1": 3}, "cannot be split 3 ways"),
        ({"kp_softmax_type": 1, "kp_softmax_dim1": 7}, "19,968 depth cannot be split evenly 7 ways"),
        ({"kp_projection_type": 2, "kp_projection_dim1": 3}, "10,240 rows cannot be split evenly 3 ways"),
    ],
)
def test_mistakes_are_told(change: dict[str, Any], words: str) -> None:
    with pytest.raises(FlopwiseError) as told:
        from_table(change, PUBLISHED)
    assert words in told.value.what
    assert told.value.hint


def test_what_is_missing_is_named() -> None:
    with pytest.raises(FlopwiseError, match="lacks core_energy_per_flop, DRAM_energy_per_bit_trans"):
        from_table({"core": 0.3})
