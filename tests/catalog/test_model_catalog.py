"""The models of the catalogue: every file decodes, and its parameters are those that were published."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from functools import cache
from importlib import resources
from pathlib import Path

import msgspec
import pytest

from flopwise.base.errors import FlopwiseError
from flopwise.catalog.load import load_model, model_folder
from flopwise.work.attention_kinds import RotaryScaling
from flopwise.work.describe import describe
from flopwise.work.lstm import Lstm
from flopwise.work.model import ARCHITECTURES, Model
from flopwise.work.transformer import Transformer
from tests.catalog.hub_configs import HUB
from tests.catalog.hybrid_configs import HYBRIDS_COUNTED

QWEN25 = tuple(f"qwen2.5-{size}" for size in ("0.5b", "1.5b", "3b", "7b", "14b", "32b", "72b"))
QWEN3 = tuple(f"qwen3-{size}" for size in ("0.6b", "1.7b", "4b", "8b", "14b", "32b"))
MPT = tuple(f"mpt-{size}" for size in ("125m", "350m", "760m", "1b", "3b", "7b", "13b", "30b", "70b"))
REQUIRED = {
    *("llama-3-1b", "llama-3-3b", "llama-3-8b", "llama-3-70b", "mistral-7b", "mixtral-8x7b"),
    *("dataflow-1b", "dataflow-15b", "dataflow-32b", "gpt-neox-20b", "pythia-1b", "pythia-6.9b"),
    *("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt-3-175b", "bert-base", "bert-large", "lstm-lm"),
    *("llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"),
    *("mixtral-8x22b", "qwen3-30b-a3b", "qwen3-235b-a22b", "olmoe-1b-7b"),
    *("gpt-oss-20b", "gpt-oss-120b", "glm-4.5-air", "qwen2-57b-a14b", "qwen1.5-moe-a2.7b"),
    *("deepseek-v2-lite", "deepseek-v3", "deepseek-v3.1", "kimi-k2", "llama-4-scout", "llama-4-maverick"),
    *("gemma-2-2b", "gemma-2-9b", "gemma-2-27b", "gemma-3-1b", "phi-4", "olmo-2-7b", "smollm3-3b"),
    *("roberta-base", "distilbert-base", "modernbert-base", "modernbert-large", "xlm-roberta-base"),
    *("smollm2-135m", "smollm2-360m", "smollm2-1.7b", "tinyllama-1.1b", "gemma-7b", "gemma-3-270m", "gemma-3-4b"),
    *("gemma-3-12b", "gemma-3-27b", "granite-3.0-2b", "granite-3.0-8b", "granite-3.1-8b", "olmo-2-1b", "olmo-2-13b"),
    *("olmo-2-32b", "olmo-3-7b", "phi-2", "phi-3-mini", "phi-3-medium", "phi-3.5-mini", "phi-4-mini", "glm-4-9b"),
    *("command-r7b", "command-r-35b", "mistral-7b-v0.3", "mistral-nemo-12b", "mistral-small-24b", "ministral-8b"),
    *("seed-oss-36b", "starcoder2-7b", "falcon-7b", "falcon-40b"),
    *HYBRIDS_COUNTED,
    *QWEN25,
    *QWEN3,
    *MPT,
}

PUBLISHED = {
    # The released weights, a tied matrix counted once (some files of tied models hold it twice).
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-1b": 1_235_814_400,
    "llama-3-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "olmoe-1b-7b": 6_919_161_856,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    # As the classes of transformers count them: no layer for a further token, no correction of routing.
    "glm-4.5-air": 106_852_245_504,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,
    "deepseek-v3.1": 671_026_404_352,
    "kimi-k2": 1_026_408_209_408,
    "llama-4-scout": 107_769_861_120,
    "llama-4-maverick": 400_711_848_960,
    "qwen2-57b-a14b": 57_408_658_944,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "pythia-1b": 1_011_781_632,
    "pythia-6.9b": 6_857_302_016,
    "gpt-neox-20b": 20_554_567_680,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "phi-4": 14_659_507_200,
    "olmo-2-7b": 7_298_617_344,
    "smollm3-3b": 3_075_098_624,
    # bert-base-uncased with a classifier of six labels.
    "bert-base": 109_486_854,
    # The safetensors of the released weights, without their table of position numbers.
    "roberta-base": 124_697_433,
    "distilbert-base": 66_985_530,
    "modernbert-base": 149_655_232,
    "modernbert-large": 395_881_664,
    "xlm-roberta-base": 278_295_186,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "tinyllama-1.1b": 1_100_048_384,
    "gemma-7b": 8_537_680_896,
    "gemma-3-270m": 268_098_176,
    # Of the whole model, without its vision tower of 416,866,032 and what brings its 1,152 channels to the text's.
    "gemma-3-4b": 4_300_079_472 - 416_866_032 - 1152 * (2560 + 1),
    "gemma-3-12b": 12_187_325_040 - 416_866_032 - 1152 * (3840 + 1),
    "gemma-3-27b": 27_432_406_640 - 416_866_032 - 1152 * (5376 + 1),
    "granite-3.0-2b": 2_533_531_648,
    "granite-3.0-8b": 8_170_848_256,
    "granite-3.1-8b": 8_170_848_256,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
    "olmo-3-7b": 7_298_011_136,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "phi-3-medium": 13_960_238_080,
    "phi-3.5-mini": 3_821_079_552,
    "phi-4-mini": 3_836_021_760,
    "glm-4-9b": 9_400_279_040,
    "command-r7b": 8_028_033_024,
    "command-r-35b": 34_980_831_232,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "ministral-8b": 8_019_808_256,
    "seed-oss-36b": 36_151_104_512,
    "starcoder2-7b": 7_173_923_840,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    **HYBRIDS_COUNTED,
}

NOT_OF_THE_HUB = {"dataflow-1b", "dataflow-15b", "dataflow-32b", "gpt-3-175b", "lstm-lm", *MPT}
"""Without released weights, or with others than the hub's: llm-foundry's MPT of the tables has learned positions."""

MPT_PUBLISHED = {
    # The NumParams column of llm-foundry's throughput tables: at 2,048 and at 65,536 tokens.
    "mpt-125m": (125_311_488, 174_070_272),
    "mpt-350m": (355_985_408, 420_997_120),
    "mpt-760m": (760_470_528, 857_988_096),
    "mpt-1b": (1_315_950_592, 1_445_974_016),
    "mpt-3b": (2_651_837_440, 2_814_366_720),
    "mpt-7b": (6_658_859_008, 6_918_905_856),
    "mpt-13b": (12_853_954_560, 13_179_013_120),
    "mpt-30b": (29_975_214_080, 30_430_296_064),
    "mpt-70b": (64_862_437_376, 65_382_531_072),
}


@cache
def table(name: str) -> dict[str, object]:
    """A model file as it is written."""
    return tomllib.loads((resources.files("flopwise") / "catalog" / "models" / f"{name}.toml").read_text("utf-8"))


@cache
def catalogue_model(name: str) -> Model:
    """A model file as a description."""
    fields = dict(table(name))
    return msgspec.convert(fields, ARCHITECTURES[str(fields.pop("architecture"))])


def transformer(name: str) -> Transformer:
    """A model file that describes a transformer."""
    model = catalogue_model(name)
    assert isinstance(model, Transformer)
    return model


def names() -> list[str]:
    """Every model file."""
    files = (resources.files("flopwise") / "catalog" / "models").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def transformer_parameters(model: Transformer, sequence_tokens: int) -> int:
    """Count weights from the shape alone, without the operators that the package derives its own count from."""
    hidden = model.hidden
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    norm = hidden * (2 if model.norm_bias else 1)
    attention = hidden * queries + 2 * hidden * keys + queries * hidden
    attention += model.qkv_bias * (queries + 2 * keys) + model.output_bias * hidden
    attention += (model.qk_norm and model.qk_norm_weights) * (
        queries + keys if model.qk_norm_over == "all" else 2 * model.head_dim
    )
    inner = 2 if model.gated else 1
    dense = len(model.dense_blocks)
    feed_forward = (inner + 1) * hidden * model.ffn + model.ffn_bias * (inner * model.ffn + hidden)
    if model.experts:
        feed_forward = model.experts * feed_forward + (hidden + model.routing.bias) * model.experts
        feed_forward += (inner + 1) * hidden * model.shared_ffn + model.shared_gate * hidden
    if model.latent is not None:
        first, rank, turned = model.latent.query_rank, model.latent.rank, model.rotary_dim or 0
        queries_made = hidden * first + first + first * queries if first else hidden * queries
        keys_made = hidden * (rank + turned) + rank
        keys_made += rank * model.heads * (model.head_dim - turned + model.latent.value_dim)
        attention = queries_made + keys_made + model.heads * model.latent.value_dim * hidden
    attention += model.sinks * model.heads + model.attention_gate * hidden * queries
    norms = {"sandwich": 4}.get(model.norm_place, 2) - model.shared_norm - model.one_branch
    carrying, feeding = len(model.recurrent_blocks), model.layers - dense
    if model.one_branch:
        feeding = len(model.feed_blocks)
    looking = model.layers - carrying - len(model.feed_blocks)
    total = model.layers * norms * norm + looking * attention + carrying * state_parameters(model)
    total += feeding * feed_forward + dense * (inner + 1) * hidden * model.dense_ffn
    total += hidden * (model.vocab + model.token_types)
    if model.positions == "learned":
        total += hidden * (model.position_rows or sequence_tokens)
    total += norm * (model.embedding_norm + model.final_norm - (model.unnormed_attention == "first"))
    if model.head == "classifier":
        return total + hidden * hidden + hidden + (hidden + 1) * (model.labels or 0)
    if model.head == "masked":
        total += hidden * hidden + model.transform_bias * hidden + norm
    return total + (0 if model.tied else hidden * model.vocab) + model.head_bias * model.vocab


def state_parameters(model: Transformer) -> int:
    """Of the mixer of a block that carries a state: products around it, convolution, decays and norm."""
    states = model.recurrence
    if states is None:
        return 0
    values, keys, per_head = states.heads * states.head_dim, states.key_heads * states.key_dim, 3
    made, normed = 2 * values + 2 * keys + states.heads, values
    if states.rule == "gated_delta":
        made, normed, per_head = made + states.heads, states.head_dim, 2
    products = model.hidden * (made + values) + states.bias * (made + model.hidden)
    return products + (values + 2 * keys) * (states.conv + states.conv_bias) + per_head * states.heads + normed


@pytest.mark.parametrize("name", names())
def test_file_decodes_under_its_own_name(name: str) -> None:
    model = catalogue_model(name)
    assert model.name == name
    assert model.title
    assert re.fullmatch(r"[a-z0-9.-]+", name)


@pytest.mark.parametrize("number", [0.0, -1e-5, float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["norm_epsilon", "rotary_base"])
def test_numbers_of_values_are_above_zero_and_finite(field: str, number: float) -> None:
    with pytest.raises(FlopwiseError, match=f"llama-3-8b: {field} must be a number above 0") as caught:
        dataclasses.replace(transformer("llama-3-8b"), **{field: number})  # type: ignore[arg-type]
    assert caught.value.hint


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"factor": 0.0}, "factor must be a number above 0"),
        ({"factor": float("inf")}, "factor must be a number above 0"),
        ({"factor": 8.0, "original_context": 0}, "original_context must be at least 1"),
        ({"factor": 8.0, "low_frequency_factor": 4.5}, "is above high_frequency_factor"),
    ],
)
def test_rotary_scaling_is_checked(fields: dict[str, float], words: str) -> None:
    with pytest.raises(FlopwiseError, match=words):
        RotaryScaling(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", names())
def test_source_says_where_the_shape_comes_from(name: str) -> None:
    model = catalogue_model(name)
    assert re.search(r"https://\S+", model.source)


@pytest.mark.parametrize("name", names())
def test_file_leaves_out_what_is_the_default(name: str) -> None:
    written = table(name)
    model = catalogue_model(name)
    defaults = {field.name: field.default for field in dataclasses.fields(model)}
    assert not [key for key, value in written.items() if key in defaults and defaults[key] == value]
    if isinstance(model, Transformer):
        assert written.get("kv_heads") != model.heads
        assert written.get("head_dim") != model.hidden / model.heads


def test_every_required_model_is_there() -> None:
    assert set(names()) >= REQUIRED


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    model = transformer(name)
    assert transformer_parameters(model, model.context) == PUBLISHED[name]


@pytest.mark.parametrize("name", MPT)
def test_mpt_parameters_grow_with_the_sequence_as_published(name: str) -> None:
    model = transformer(name)
    assert (transformer_parameters(model, 2048), transformer_parameters(model, 65536)) == MPT_PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_described_work_has_the_published_parameters(name: str) -> None:
    """What the operators hold, from which every prediction starts, against the released weights."""
    model = catalogue_model(name)
    assert describe(model, model.context).parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", MPT)
def test_described_mpt_has_the_published_parameters(name: str) -> None:
    """The same for the tables' NumParams column, which grows with the sequence."""
    model = catalogue_model(name)
    assert (describe(model, 2048).parameters, describe(model, 65536).parameters) == MPT_PUBLISHED[name]


def test_gpt3_has_the_parameters_of_its_name() -> None:
    model = transformer("gpt-3-175b")
    assert round(transformer_parameters(model, 2048) / 1e9, 1) == 174.6


@pytest.mark.parametrize(("name", "non_embedding"), [("pythia-1b", 805_736_448), ("pythia-6.9b", 6_444_163_072)])
def test_pythia_without_embeddings_is_what_its_model_card_says(name: str, non_embedding: int) -> None:
    model = transformer(name)
    assert transformer_parameters(model, 2048) - 2 * model.vocab * model.hidden == non_embedding


@pytest.mark.parametrize(
    ("name", "block_mib", "bytes_per_token"),
    [
        ("dataflow-1b", 116.008, (6_152, 10_376, 51_336)),
        ("dataflow-15b", 416.016, (12_296, 20_616, 94_344)),
        ("dataflow-32b", 930.020, (14_344, 24_744, 155_816)),
    ],
)
def test_dataflow_shapes_give_the_sizes_of_the_offload_trainer(
    name: str, block_mib: float, bytes_per_token: tuple[int, int, int]
) -> None:
    """The trainer's bytes of a bf16 block, and of a token at its three levels of saving."""
    model = transformer(name)
    queries, keys = model.query_width, model.kv_width
    block = 2 * model.hidden + 2 * model.hidden * (queries + keys) + 3 * model.hidden * model.ffn
    context = 2 * model.hidden + 8 + 4 * keys
    attention = context + 4 * model.heads + 2 * queries
    everything = attention + 2 * queries + 2 * model.hidden + 4 * model.ffn
    assert round(2 * block / 2**20, 3) == block_mib
    assert (context, attention, everything) == bytes_per_token


def test_lstm_has_the_parameters_that_the_reference_prints() -> None:
    model = catalogue_model("lstm-lm")
    assert isinstance(model, Lstm)
    hidden, vocab = model.hidden, model.vocab
    cells = model.layers * (2 * hidden + 1) * 4 * hidden
    total = vocab * hidden + cells + hidden * model.projection + (hidden + 1) * vocab
    assert round(total / 1e9, 2) == 38.37
    assert model.head_input == "hidden"


def test_names_of_the_hub_are_one_models_each() -> None:
    listed = {name: [*table(name).get("hub", ()), *table(name).get("aliases", ())] for name in names()}  # type: ignore[misc]
    every = [other.lower() for others in listed.values() for other in others]
    assert len(every) == len({*every, *names()}) - len(names()), "a name means one model"
    assert {name for name, others in listed.items() if not others} == NOT_OF_THE_HUB
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", other) for name in names() for other in table(name).get("hub", ()))  # type: ignore[attr-defined]


def test_a_name_of_the_hub_that_was_not_fetched_is_the_catalogues(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    model = load_model("Qwen/Qwen3-8B", {"layers": 4})
    assert isinstance(model, Transformer)
    assert (model.name, model.hidden, model.layers) == ("qwen3-8b+layers=4", 4096, 4)
    assert model.note == "Qwen/Qwen3-8B was not fetched from the hub: it is described by qwen3-8b of the catalogue"
    assert load_model("llama-3.2-1b") == load_model("llama-3-1b")
    with pytest.raises(FlopwiseError, match="there is no Qwen/Qwen3-Unheard, neither as a path") as caught:
        load_model("Qwen/Qwen3-Unheard")
    assert caught.value.hint is not None and "hf download Qwen/Qwen3-Unheard" in caught.value.hint
    # What is there goes before the catalogue, and weights are only what is there.
    with pytest.raises(FlopwiseError, match="there is no Qwen/Qwen3-8B"):
        model_folder("Qwen/Qwen3-8B")
    folder = tmp_path / "models--Qwen--Qwen3-8B"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0123456789abcdef", encoding="utf-8")
    snapshot = folder / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(HUB["microsoft/phi-2"]), encoding="utf-8")
    fetched = load_model("Qwen/Qwen3-8B")
    assert isinstance(fetched, Transformer) and fetched.layers == 32 and fetched.note is None


def test_an_address_is_no_path() -> None:
    with pytest.raises(FlopwiseError, match="is an address") as told:
        load_model("https://huggingface.co/Qwen/Qwen3-8B")
    assert "Qwen/Qwen3-8B" in str(told.value.hint)


def test_fewer_layers_than_reach_the_first_block_with_experts_are_refused() -> None:
    for name in ("nemotron-3-nano-30b-a3b", "deepseek-v2-lite"):
        with pytest.raises(FlopwiseError, match="none of its blocks has experts") as told:
            load_model(name, {"layers": 1})
        assert told.value.why and told.value.hint
    two = load_model("nemotron-3-nano-30b-a3b", {"layers": 2})
    assert isinstance(two, Transformer) and two.mixed_blocks == (1,)
