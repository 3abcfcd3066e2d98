"""Text and labels → batches of token identifiers. No torch here.

A file of tokens is kept for each set of data, under a name made of everything that went into it.
"""

from __future__ import annotations

from flopwise.engine.data.classification import ClassificationData, open_classification_data
from flopwise.engine.data.examples import ExampleData, holds_examples, open_example_data
from flopwise.engine.data.language import LanguageData, open_language_data
from flopwise.engine.data.masked import MaskedData, open_masked_data
from flopwise.engine.data.preferences import PreferenceData, open_preference_data
from flopwise.engine.data.request import DataRequest
from flopwise.engine.data.streamed import StreamedData, is_streamed, open_streamed_data

FileData = LanguageData | StreamedData | ExampleData | ClassificationData
"""What files hold, by what is learned of it."""

__all__ = [
    "ClassificationData",
    "DataRequest",
    "ExampleData",
    "FileData",
    "LanguageData",
    "MaskedData",
    "PreferenceData",
    "StreamedData",
    "holds_examples",
    "is_streamed",
    "open_classification_data",
    "open_example_data",
    "open_language_data",
    "open_masked_data",
    "open_preference_data",
    "open_streamed_data",
]
