"""Whatever words are typed, the command line answers: 0, or 2 with an error and a hint. Nothing else ever comes out."""

from __future__ import annotations

import contextlib
import io
import sys

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from flopwise.cli import main

quantities = st.one_of(
    st.integers(-5, 10**18).map(str),
    st.floats().map(str),
    st.builds("{}{}".format, st.integers(0, 99999), st.sampled_from(["k", "M", "G", "GiB", "GB", "x", " k", "kk"])),
    st.text(max_size=6),
)
OPTIONS = {
    "--seq": quantities,
    "--batch": quantities,
    "--batch-tokens": quantities,
    "--micro": quantities,
    "--device-mem": quantities,
    "--precision": st.sampled_from(["bf16", "fp32", "fp8", "tf32", "bf16,master=fp32", "master=none", "fp64", ",", "="])
    | st.text(max_size=12),
    "--recompute": st.sampled_from(["none", "full", "input", "FULL"]) | st.text(max_size=6),
    "--optimizer": st.sampled_from(["adamw", "sgd", "adam"]),
    "--attention": st.sampled_from(["flash", "eager", "math"]),
    "--fusion": st.sampled_from(["fused", "eager"]),
    "--convention": st.sampled_from(["causal", "palm", "half"]),
    "--set": st.builds(
        "{}={}".format,
        st.sampled_from(["layers", "hidden", "heads", "window", "tied", "experts", "labels", "name", "x"]),
        quantities,
    ),
    "-o": st.sampled_from(["table", "md", "csv", "json", "xml"]),
}


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    model = draw(st.sampled_from(["llama-3-8b", "mixtral-8x7b", "bert-base", "lstm-lm", "gpt2", "lama"]) | st.text())
    device = draw(st.sampled_from(["h200", "v100", "trn1", "mi300x", "h20"]) | st.text(max_size=8))
    chosen = draw(st.lists(st.sampled_from(list(OPTIONS)), max_size=5, unique=True))
    words = ["predict", model, "--on", device]
    for option in chosen:
        words += [option, draw(OPTIONS[option])]
    return [*words, "--show-config"] if draw(st.integers(0, 9)) == 0 else words


def answered(words: list[str]) -> tuple[int, str, str]:
    """Exit code and streams of a command run in this process; any exception but SystemExit is a failure."""
    out, err = io.StringIO(), io.StringIO()
    arguments, sys.argv = sys.argv, ["flopwise", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
        code: object = 0
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        sys.argv = arguments
    assert isinstance(code, int)
    return code, out.getvalue(), err.getvalue()


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(command_lines())
@example(["predict", "llama-3-8b", "--on", "h200", "--seq", "2147483647", "--batch", "9007199254740992"])
@example(["predict", "llama-3-8b", "--on", "h200", "--seq", "1", "--batch", "1"])
@example(["predict", "mixtral-8x7b", "--on", "h200", "--seq", "1", "--batch", "1", "--attention", "eager"])
@example(["predict", "llama-3-8b", "--on", "h200", "--device-mem", "0"])
@example(["predict", "\x00", "--on", "\x00/x.toml"])
@example(["predict", "llama-3-8b", "--on", "h200", "--set", "name=x", "--set", "layers=true"])
@example(["predict", "llama-3-8b", "--on", "h200", "--set", "labels=0"])
@example(["predict", "llama-3-8b,gpt2", "--on", "h200,v100", "--show-config", "-o", "md"])
@example(["predict", "\udcff", "--on", "\udcff.toml"])
def test_every_command_line_is_answered(words: list[str]) -> None:
    code, out, err = answered(words)
    assert code in (0, 2), (code, err)
    if code == 0:
        assert out.strip() or "--help" in words or "--version" in words
    else:
        assert out == ""
        assert "error" in err.lower()
        assert "hint: " in err or "Usage: " in err


@pytest.mark.parametrize("words", [[], ["--help"], ["--version"], ["predict", "--help"], ["ls", "--help"]])
def test_help_is_always_there(words: list[str]) -> None:
    code, out, err = answered(words)
    assert code in (0, 2)
    assert "flopwise" in out + err
