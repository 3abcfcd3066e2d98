"""The parts of the language model, forward and backward, on one device or with their products split over several.

Splitting (m × k)·(k × n) over devices:

    column-row, p ways     forward: m × k/p × n, then a reduce-scatter of m × n. Backward: m × n gathered, then
                           k/p × m × n (weights) and m × n × k/p (activations)
    row-column, p × q      forward: m/p × k × n/q, then m/p × n gathered over q. Backward: k × m and twice m × n/q
                           gathered over p, m/p × n, k × n and m/p × k over q, then k/p × m × n/q and m/p × n × k/q
"""

from __future__ import annotations

from flopwise.references.deepflow.configuration import Split
from flopwise.references.deepflow.kernels import Cost, Kernels, PrintedLine, Roofline, lines_of

CELL_LAUNCHES = 15
SOFTMAX_LAUNCHES = 4
POINTS = "{} point_flop: {:,}, point_mem: {:,}\n"
"""Of work element by element."""


def cell_forward(kernels: Kernels) -> Cost:
    """Cf: one layer at one time step."""
    model, split = kernels.configuration.model, kernels.configuration.parallel.hidden
    rows, depth, columns = kernels.configuration.shard_sequences, 2 * model.hidden, model.gates * model.hidden
    if split.kind != "none":
        product, reduction = _split_forward(kernels, split, f"Cf{_suffix(split)}", (rows, depth, columns))
        pointwise = _split_cell_pointwise(kernels, split, rows=rows / _rows(split))
        # What follows its roofline goes unmentioned here.
        return _sum(product, reduction, Cost(pointwise.seconds, pointwise.lines[:1]))
    product = kernels.product("Cf", rows, depth, columns)
    # A bias, 5/4 non-linear functions and a multiplication with addition for each gate.
    flops, moved = rows * columns * 3.25, model.element_bytes * rows * columns * 8.5
    roofline = kernels.roofline(flops, moved)
    seconds = roofline.seconds + CELL_LAUNCHES * kernels.launch_s
    return _sum(product, Cost(seconds, _pointwise(roofline, "Hidden", "\nHidden point_time: {:,}\n", seconds)))


def cell_backward(kernels: Kernels) -> Cost:
    """Cb: the same, backward, with the addition to the weights' gradients."""
    model, split = kernels.configuration.model, kernels.configuration.parallel.hidden
    rows, depth, columns = kernels.configuration.shard_sequences, 2 * model.hidden, model.gates * model.hidden
    if split.kind != "none":
        # Row-column counts the messages of all rows here, although each device holds a part of them.
        pointwise = _split_cell_pointwise(kernels, split, rows=rows)
        product, reduction = _split_backward(kernels, split, f"Cb{_suffix(split)}", (rows, depth, columns))
        rooflined, told = pointwise.lines
        return Cost(
            product.seconds + reduction.seconds + pointwise.seconds,
            (rooflined, *lines_of((reduction, product)), told),
        )
    activations = kernels.product("Cb_act", rows, columns, depth)
    weights = kernels.product("Cb_wt", depth, rows, columns)
    # The gates are missing in the first terms, the width of a number in the second of the bytes.
    flops = rows * model.hidden * 3.25 + depth * columns
    moved = model.element_bytes * rows * model.hidden * 8.5 + 3 * depth * columns
    roofline = kernels.roofline(flops, moved)
    seconds = roofline.seconds + CELL_LAUNCHES * kernels.launch_s
    pointwise = Cost(seconds, _pointwise(roofline, "(gr) Hidden", "Hidden point_time: {:,}\n", seconds))
    return _sum(_sum(activations, weights), pointwise)


def softmax_forward(kernels: Kernels) -> Cost:
    """All time steps at once."""
    model, split = kernels.configuration.model, kernels.configuration.parallel.softmax
    tokens, width = kernels.configuration.shard_sequences * model.sequence_tokens, model.element_bytes
    if split.kind == "none":
        product = kernels.product("softmax_f", tokens, model.hidden, model.vocab)
        flops, moved = tokens * (3 * model.vocab - 1), 7 * width * tokens * model.vocab
        roofline = kernels.roofline(flops, moved)
        seconds = roofline.seconds + SOFTMAX_LAUNCHES * kernels.launch_s
        return _sum(product, Cost(seconds, _pointwise(roofline, "Softmax", "point_time: {:,}\n", seconds)))
    # Split, the depth is the projection, although one device alone reads the hidden state.
    name = f"softmax_f{_suffix(split)}"
    product, reduction = _split_forward(kernels, split, name, (tokens, model.projection, model.vocab))
    rows, ways = tokens / _rows(split), _ways(split)
    elements = rows * (model.vocab / ways)
    roofline = kernels.roofline(elements * 3, width * elements * 7)
    message_s = width * rows * ways / kernels.machine.network_bytes_per_s
    seconds = roofline.seconds + kernels.launch_s + message_s
    times = "Softmax GEMM_time: {:,}, point_time: {:,}\n"
    told = _pointwise(roofline, "Softmax", times, product.seconds, seconds)
    return _sum(product, reduction, Cost(seconds, told))


def softmax_backward(kernels: Kernels) -> Cost:
    """All time steps at once."""
    model, split = kernels.configuration.model, kernels.configuration.parallel.softmax
    tokens, width = kernels.configuration.shard_sequences * model.sequence_tokens, model.element_bytes
    if split.kind == "none":
        weights = kernels.product("softmax_b_wt", model.hidden, tokens, model.vocab)
        activations = kernels.product("softmax_b_act", tokens, model.vocab, model.hidden)
        flops, moved = 5 * tokens * model.vocab, 11 * width * tokens * model.vocab
        roofline = kernels.roofline(flops, moved)
        seconds = roofline.seconds + SOFTMAX_LAUNCHES * kernels.launch_s
        pointwise = Cost(seconds, _pointwise(roofline, "(gr) Softmax", "(gr) Softmax point_time: {:,}\n", seconds))
        return _sum(_sum(weights, activations), pointwise)
    rows, ways = tokens / _rows(split), _ways(split)
    roofline = kernels.roofline(rows * (model.vocab / ways) * 5, width * rows * (model.vocab / ways) * 11)
    pointwise_s = roofline.seconds + kernels.launch_s
    rooflined, told = _pointwise(roofline, "(gr) Softmax")
    depth = model.projection if split.kind == "column-row" else model.hidden
    name = f"softmax_b{_suffix(split)}"
    product, reduction = _split_backward(kernels, split, name, (tokens, depth, model.vocab))
    return Cost(reduction.seconds + product.seconds + pointwise_s, (rooflined, *lines_of((reduction, product)), told))


def projection_forward(kernels: Kernels) -> Cost:
    """All time steps at once. Printed, and in no total."""
    model, split = kernels.configuration.model, kernels.configuration.parallel.projection
    tokens = kernels.configuration.shard_sequences * model.sequence_tokens
    if split.kind == "none":
        return kernels.product("projection", tokens, model.hidden, model.projection)
    return _sum(*_split_forward(kernels, split, "projection_f", (tokens, model.hidden, model.projection)))


def projection_backward(kernels: Kernels) -> Cost:
    """All time steps at once. Printed, and in no total. Row-column repeats the forward pass."""
    model, split = kernels.configuration.model, kernels.configuration.parallel.projection
    tokens = kernels.configuration.shard_sequences * model.sequence_tokens
    if split.kind == "none":
        weights = kernels.product("projection_b_wt", model.projection, tokens, model.hidden)
        return _sum(weights, kernels.product("projection_b_act", tokens, model.projection, model.hidden))
    if split.kind == "row-column":
        return _sum(*_split_forward(kernels, split, "projection_b", (tokens, model.hidden, model.projection)))
    product, reduction = _split_backward(kernels, split, "projection_b", (tokens, model.hidden, model.projection))
    return Cost(product.seconds + reduction.seconds, lines_of((reduction, product)))


def _split_forward(kernels: Kernels, split: Split, name: str, shape: tuple[int, int, int]) -> tuple[Cost, Cost]:
    """The product on one device, and its reduction."""
    (rows, depth, columns), first, second = shape, split.first, split.second
    if split.kind == "column-row":
        product = kernels.product(name, rows, depth / first, columns)
        return product, kernels.reduction(rows, columns, first, sums=True, scattered=True)
    product = kernels.product(name, rows / first, depth, columns / second)
    return product, kernels.reduction(rows / first, columns, second, sums=False)


def _split_backward(kernels: Kernels, split: Split, name: str, shape: tuple[int, int, int]) -> tuple[Cost, Cost]:
    """The two products on one device, and their reductions."""
    (rows, depth, columns), first, second = shape, split.first, split.second
    if split.kind == "column-row":
        reduction = kernels.reduction(rows, columns, first, sums=False)
        products = _sum(
            kernels.product(f"{name}wt", depth / first, rows, columns),
            kernels.product(f"{name}act", rows, columns, depth / first),
        )
        # Counted here, and once more by whoever adds the two up.
        return Cost(products.seconds + reduction.seconds, products.lines), reduction
    reduction = _sum(
        kernels.reduction(depth, rows, first, sums=False, scattered=True),
        kernels.reduction(rows, columns / second, first, sums=False),
        kernels.reduction(rows, columns / second, first, sums=False),
        kernels.reduction(rows / first, columns, second, sums=False),
        kernels.reduction(depth, columns, second, sums=False, scattered=True),
        kernels.reduction(rows / first, depth, second, sums=False),
    )
    products = _sum(
        kernels.product(f"{name}wt", depth / first, rows, columns / second),
        kernels.product(f"{name}act", rows / first, columns, depth / second),
    )
    return products, reduction


def _split_cell_pointwise(kernels: Kernels, split: Split, *, rows: float) -> Cost:
    """Four functions on the critical path, three of which wait for other devices' elements of `rows` rows."""
    model = kernels.configuration.model
    columns = model.gates * model.hidden / _ways(split)
    elements = kernels.configuration.shard_sequences / _rows(split) * columns
    roofline = kernels.roofline(elements * 4, model.element_bytes * elements * 11)
    # Elements, not bytes: the width of a number is missing.
    message_s = rows * columns * 3 / kernels.machine.network_bytes_per_s
    return Cost(roofline.seconds + kernels.launch_s + message_s, _pointwise(roofline, "(gr) Hidden"))


def _pointwise(roofline: Roofline, label: str, times: str = "", *seconds: float) -> tuple[PrintedLine, PrintedLine]:
    values = (label, int(roofline.flops), int(roofline.dram_bytes), *seconds)
    return roofline.line, PrintedLine(f"{POINTS}{times}\n", values)


def _sum(*costs: Cost) -> Cost:
    return Cost(sum(cost.seconds for cost in costs), lines_of(costs))


def _rows(split: Split) -> int:
    """How many ways the rows are shared out."""
    return split.first if split.kind == "row-column" else 1


def _ways(split: Split) -> int:
    """How many ways the columns of the result are shared out once it is summed or gathered."""
    return split.second if split.kind == "row-column" else split.first


def _suffix(split: Split) -> str:
    return "_kp1" if split.kind == "column-row" else "_kp2"
