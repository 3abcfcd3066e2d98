"""What can be trained on without any file: the standard library."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from flopwise.base.errors import FlopwiseError
from flopwise.engine.batch import Batch
from flopwise.engine.data import embedded, open_classification_data, open_language_data
from tests.support.data_files import request


def test_the_text_is_some_megabytes_of_python(tmp_path: Path) -> None:
    data = open_language_data(request(tmp_path, sequence_tokens=256))
    described = data.describe()
    assert 2e6 < described["bytes"] <= embedded.MOST_TEXT_BYTES
    assert data.notes == ()
    assert described["files"] > 50
    assert data.count + data.evaluation_count == (described["tokens"] - 1) // 256
    text = bytes(token for token in data.batch(0, 200).ids.ravel().tolist() if token < 256).decode("utf-8", "replace")
    assert "def " in text and "return" in text


def test_no_tests_and_nothing_that_was_installed_is_in_it() -> None:
    names = [source.name for source in embedded.text_sources()]
    assert len(set(names)) == len(names)
    assert not [name for name in names if "site-packages" in name or "test" in name.split("/")]


def test_the_text_is_the_same_each_time(tmp_path: Path) -> None:
    first, second = (open_language_data(request(tmp_path / name)).describe() for name in ("one", "two"))
    assert first == second


def test_samples_differ_and_every_label_has_as_many() -> None:
    samples = embedded.snippets()
    assert len({sample.text for sample in samples}) == len(samples)
    counts = Counter(sample.label for sample in samples)
    assert 6 <= len(counts) <= 8
    assert len(set(counts.values())) == 1
    assert 200 <= counts["argparse"] <= 400


def test_samples_do_not_name_their_module() -> None:
    for sample in embedded.snippets():
        lines = sample.text.split("\n")
        assert 3 <= len(lines) <= 6 and all(line.strip() for line in lines)
        assert sample.label not in sample.text.lower()
        assert not [line for line in lines if line.lstrip().startswith(("#", "import "))]


def test_samples_are_a_classification_set(tmp_path: Path) -> None:
    data = open_classification_data(request(tmp_path, sequence_tokens=128))
    assert data.labels == tuple(sorted({sample.label for sample in embedded.snippets()}))
    assert data.count + data.evaluation_count == len(embedded.snippets())
    held_out = np.concatenate([batch.labels for batch in data.evaluation(50)])
    assert set(held_out) == set(range(len(data.labels)))


def features(batch: Batch) -> NDArray[np.float64]:
    """How often each byte comes, as the square root of its share."""
    assert batch.lengths is not None
    counted = [np.bincount(ids[1:length], minlength=256) for ids, length in zip(batch.ids, batch.lengths, strict=True)]
    shares: NDArray[np.float64] = np.sqrt(np.array(counted) / np.maximum(1, batch.lengths - 1)[:, None])
    return shares


def test_counting_bytes_alone_beats_guessing_clearly(tmp_path: Path) -> None:
    data = open_classification_data(request(tmp_path, sequence_tokens=256, evaluation_share=0.25))
    train = data.batch(0, data.count)
    held_out = next(data.evaluation(data.evaluation_count))
    known = features(train)
    centers = np.array([known[train.labels == label].mean(axis=0) for label in range(len(data.labels))])
    found = ((features(held_out)[:, None, :] - centers) ** 2).sum(axis=2).argmin(axis=1)
    accuracy = (found == held_out.labels).mean()
    majority = np.bincount(held_out.labels).max() / held_out.labels.size
    assert accuracy > 2 * majority
    # Yet it leaves something to learn.
    assert accuracy < 0.9


def test_a_python_without_its_sources_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    embedded.snippets.cache_clear()
    for opened in (open_language_data, open_classification_data):
        with pytest.raises(FlopwiseError, match="no embedded data") as caught:
            opened(request(tmp_path))
        assert caught.value.hint


def test_data_loads_neither_torch_nor_tokenizers() -> None:
    program = "import sys, flopwise.engine.data; print({'torch', 'tokenizers'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"
