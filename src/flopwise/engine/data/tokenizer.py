"""Text → token identifiers: bytes, or what a tokenizer.json says."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from flopwise.base.errors import FlopwiseError, shown
from flopwise.base.files import entry_kind, read_bounded, read_table, read_text
from flopwise.catalog.hub import find_snapshot, is_hub_name
from flopwise.engine.data.chat import ChatTemplate

if TYPE_CHECKING:
    from tokenizers import Encoding

BYTES = "bytes"
"""The tokenizer that every model has: bytes are their own identifiers."""
END_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[SEP]")
"""What tokenizers call the end of a text, the first that is there."""
PAD_NAMES = ("[PAD]", "<pad>", "<|pad|>")
MASK_NAMES = ("[MASK]", "<mask>", "<|mask|>")
BYTE_MASK = "<|mask|>"
"""What bytes have for it, where something is hidden: their token 257."""

MOST_FILE_BYTES = 512 * 2**20
"""Of a tokenizer.json; the largest are tens of megabytes."""
PANIC_MODULE = "pyo3_runtime"
"""Of the exception that a panic of Rust code is told by; it has no other name to be imported by."""
LONGEST_REASON = 200
UNKNOWN_HINT = "a tokenizer needs a token for what it does not know, such as [UNK]"

Tokens = NDArray[np.unsignedinteger[Any]]


class Tokenizer(Protocol):
    """What is needed of one."""

    name: str
    size: int
    """Every identifier is below it."""
    begin: tuple[int, ...]
    """Stands before every document: what the tokenizer itself puts before a text."""
    end: int | None
    """Stands behind every document."""
    pad: int
    mask: int | None
    """Stands in the place of what is hidden; None: it has no such token."""
    special: frozenset[int]
    """Identifiers of no text: marks, padding, what is unknown."""
    frame: tuple[tuple[int, ...], tuple[int, ...]]
    """What stands before and behind a text that an encoder reads, as `samples` has it."""
    continues: frozenset[int] | None
    """Identifiers that go on with the word before them; None: they do not say."""

    template: ChatTemplate | None
    """How conversations are written; None: it has none."""

    def ingredients(self) -> dict[str, Any]:
        """Whatever decides which identifiers come out: part of a cache's key."""

    def documents(self, texts: Sequence[str]) -> list[Tokens]:
        """Texts in full, without any token that is not of the text."""

    def samples(self, texts: Sequence[str], most: int) -> list[Tokens]:
        """Texts as a classifier sees them: with the tokens that mark a sample, at most so many in all."""

    def pairs(self, texts: Sequence[tuple[str, str]], most: int) -> list[tuple[Tokens, NDArray[np.uint8]]]:
        """Pairs of texts as one sample each, with the type of every token; of the longer one more is cut off."""

    def placed(self, texts: Sequence[str]) -> list[tuple[Tokens, NDArray[np.int64]]]:
        """Texts in full with the characters of each token, the first and the one behind the last."""


def token_type(size: int) -> type[np.uint16] | type[np.uint32]:
    """The narrowest type that holds every identifier."""
    return np.uint16 if size <= 2**16 else np.uint32


def load_tokenizer(path: str | None, vocab: int, *, masked: bool = False) -> Tokenizer:
    """A tokenizer whose identifiers a model with so many tokens knows; `masked`: bytes have one for what is hidden."""
    tokenizer: Tokenizer = (
        ByteTokenizer(masked=masked) if path in (None, BYTES) else FileTokenizer(tokenizer_file(path))
    )
    if tokenizer.size > vocab:
        raise FlopwiseError(
            f"{tokenizer.name} does not match the model: it has the token {tokenizer.size - 1:,}",
            why=f"the model knows {vocab:,} tokens, the last of them {vocab - 1:,}",
            hint="name the model's own tokenizer.json"
            + (
                f", or a model with a vocabulary of at least {tokenizer.size}"
                if path is None
                else ", or correct the model's `vocab`"
            ),
        )
    return tokenizer


def tokenizer_file(name: str) -> Path:
    """The file that is meant: itself, the one in a folder, or the one that was fetched under a hub's name."""
    if is_hub_name(name):
        return find_snapshot(name, "tokenizer.json") / "tokenizer.json"
    path = Path(name)
    return path / "tokenizer.json" if path.is_dir() else path


class ByteTokenizer:
    """Bytes are their own identifiers; 256 is behind a document and in front of a sample, 257 for what is hidden."""

    name = BYTES
    size = 257
    begin: tuple[int, ...] = ()
    end: int | None = 256
    pad = 0
    mask: int | None = None
    special = frozenset({256, 257})
    frame: tuple[tuple[int, ...], tuple[int, ...]] = ((256,), ())
    continues: frozenset[int] | None = None
    template: ChatTemplate | None = None

    def __init__(self, *, masked: bool = False) -> None:
        if masked:
            self.size, self.mask = 258, 257

    def ingredients(self) -> dict[str, Any]:
        return {"kind": "bytes", "end": self.end, "class": self.end, "pad": self.pad}

    def documents(self, texts: Sequence[str]) -> list[Tokens]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16) for text in texts]

    def samples(self, texts: Sequence[str], most: int) -> list[Tokens]:
        front = np.array([self.end], dtype=np.uint16)
        return [np.concatenate([front, tokens[: most - 1]]) for tokens in self.documents(texts)]

    def pairs(self, texts: Sequence[tuple[str, str]], most: int) -> list[tuple[Tokens, NDArray[np.uint8]]]:
        if most < 3:
            raise _too_short(most, self.name, 2)
        front = np.array([self.end], dtype=np.uint16)
        found = []
        for pair in texts:
            one, two = self.documents(pair)
            kept = _kept_of_both(one.size, two.size, most - 2)
            parts = [np.concatenate([front, tokens[:count]]) for tokens, count in zip((one, two), kept, strict=True)]
            found.append(
                (np.concatenate(parts), np.repeat(np.arange(2, dtype=np.uint8), [part.size for part in parts]))
            )
        return found

    def placed(self, texts: Sequence[str]) -> list[tuple[Tokens, NDArray[np.int64]]]:
        raise AssertionError(f"{len(texts)} conversations, and bytes have no template")


def _kept_of_both(one: int, two: int, most: int) -> tuple[int, int]:
    """Tokens that stay of two texts: the longer one is cut first, as tokenizers does."""
    shorter = min(one, two)
    longer = shorter if shorter > most else min(max(one, two), max(shorter, most - shorter))
    if shorter + longer > most:
        shorter, longer = most // 2, most // 2 + most % 2
    return (longer, shorter) if one > two else (shorter, longer)


def _too_short(most: int, name: str, added: int) -> FlopwiseError:
    return FlopwiseError(
        f"sequences of {most:,} tokens are too short for {name}",
        why=f"it adds {added:,} tokens to every sample",
        hint=f"sequences of at least {added + 1:,} tokens",
    )


class FileTokenizer:
    """What the tokenizers library makes of a tokenizer.json. Truncation and padding of the file are not used."""

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError:
            raise FlopwiseError(
                "a tokenizer.json cannot be used",
                why="the package tokenizers is not installed",
                hint="pip install 'flopwise[train]', or leave the tokenizer out to train on bytes",
            ) from None
        self.path = path
        self._placing: tokenizers.Tokenizer | None = None
        content = _content(self.path)
        with _in_words(f"{self.path} is not a tokenizer", "name the model's tokenizer.json"):
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
            self._settle()
            known = self._tokenizer.get_vocab(with_added_tokens=True)
        self.name = str(self.path)
        self.size = max(known.values(), default=-1) + 1
        if not known:
            raise FlopwiseError(f"{self.path} knows no token", hint="name the model's tokenizer.json")
        self.config = _config_beside(self.path)
        ends = (_token(self.config.get("eos_token")), *END_NAMES)
        self.end_name = next((name for name in ends if name in known), None)
        self.end = None if self.end_name is None else known[self.end_name]
        self.pad = next(
            (known[name] for name in (_token(self.config.get("pad_token")), *PAD_NAMES) if name in known), 0
        )
        self.frame = self._find_frame()
        self.begin = self.frame[0]
        masks = (_token(self.config.get("mask_token")), *MASK_NAMES)
        self.mask_name = next((name for name in masks if name in known), None)
        self.mask = None if self.mask_name is None else known[self.mask_name]
        self.special = self._find_special(known)
        prefix = getattr(self._tokenizer.model, "continuing_subword_prefix", None)
        wordpiece = isinstance(self._tokenizer.model, tokenizers.models.WordPiece)
        self.continues = (
            frozenset(number for name, number in known.items() if name.startswith(str(prefix))) - self.special
            if wordpiece and prefix
            else None
        )
        self.template = self._find_template()
        self._sha256 = hashlib.sha256(content).hexdigest()
        self._library = tokenizers.__version__

    def _settle(self) -> None:
        """Leave nothing of the file in force that would cut, fill up or change at random."""
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        if getattr(self._tokenizer.model, "dropout", None):
            self._tokenizer.model.dropout = None  # type: ignore[attr-defined, unused-ignore]

    def _find_template(self) -> ChatTemplate | None:
        """The template beside the tokenizer, in a file of its own or in its configuration."""
        source = _read_template(self.path.parent) or self.config.get("chat_template")
        if isinstance(source, list):
            # Several by name: the default one is for conversations without tools.
            named = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
            source = named.get("default")
        if not isinstance(source, str):
            return None
        special = {key: _token(self.config[key]) for key in self.config if key.endswith("_token")}
        self._template_sha256 = hashlib.sha256(source.encode()).hexdigest()
        return ChatTemplate(source, {key: name for key, name in special.items() if name}, str(self.path))

    def _find_special(self, known: dict[str, int]) -> frozenset[int]:
        """What the file, or the configuration beside it, calls special."""
        added = self._tokenizer.get_added_tokens_decoder()
        named = (_token(self.config[key]) for key in self.config if key.endswith("_token"))
        found = {number for number, token in added.items() if token.special} | {*self.frame[0], *self.frame[1]}
        marks = {number for number in (self.mask, self.end) if number is not None}
        return frozenset(found | marks | {known[name] for name in named if name in known})

    def _find_frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What it puts before a text by itself, as Llama 3 and Gemma do, and behind it."""
        with _in_words(f"{self.path} cannot tokenize a text", "name the model's tokenizer.json"):
            bare = list(self._tokenizer.encode("a", add_special_tokens=False).ids)
            marked = list(self._tokenizer.encode("a", add_special_tokens=True).ids)
        places = [first for first in range(len(marked)) if bare and marked[first : first + len(bare)] == bare]
        if not places:
            return (), ()
        return tuple(marked[: places[0]]), tuple(marked[places[0] + len(bare) :])

    def ingredients(self) -> dict[str, Any]:
        return {
            "kind": "tokenizer.json",
            "sha256": self._sha256,
            "library": self._library,
            "begin": self.begin,
            "template": self._template_sha256 if self.template is not None else None,
            "end": self.end,
            "pad": self.pad,
        }

    def documents(self, texts: Sequence[str]) -> list[Tokens]:
        self._tokenizer.no_truncation()
        return self._encode(texts, special=False)

    def samples(self, texts: Sequence[str], most: int) -> list[Tokens]:
        self._truncate(most, pairs=False)
        return self._encode(texts, special=True)

    def _truncate(self, most: int, *, pairs: bool) -> None:
        with _in_words(f"{self.path} cannot be used for samples", "name the model's tokenizer.json"):
            alone, added = (self._tokenizer.num_special_tokens_to_add(each) for each in (False, pairs))
        if pairs and added <= alone:
            raise FlopwiseError(
                f"{self.path} puts nothing between the two texts of a pair",
                why="a model could not tell where the second begins",
                hint="an encoder's own tokenizer.json, whose template has [SEP] or </s> between them",
            )
        if added >= most:
            # The library would leave the truncation out.
            raise _too_short(most, str(self.path), added)
        self._tokenizer.enable_truncation(most, strategy="longest_first", direction="right")

    def pairs(self, texts: Sequence[tuple[str, str]], most: int) -> list[tuple[Tokens, NDArray[np.uint8]]]:
        self._truncate(most, pairs=True)
        with _in_words(f"{self.path} cannot tokenize the texts", UNKNOWN_HINT):
            found: list[Encoding] = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=True)
        types = (np.array(encoding.type_ids, dtype=np.uint8) for encoding in found)
        return list(zip(self._checked(found), types, strict=True))

    def placed(self, texts: Sequence[str]) -> list[tuple[Tokens, NDArray[np.int64]]]:
        import tokenizers

        if self._placing is None:
            # Without its post-processor, which may leave spaces out of the characters of a token.
            self._placing = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
            self._placing.no_truncation()
            self._placing.post_processor = None  # type: ignore[assignment, unused-ignore]
        with _in_words(f"{self.path} cannot tokenize the text", "name the model's tokenizer.json"):
            found: list[Encoding] = self._placing.encode_batch(list(texts), add_special_tokens=False)
        kind = token_type(self.size)
        return [
            (np.array(each.ids, dtype=kind), np.array(each.offsets, dtype=np.int64).reshape(-1, 2)) for each in found
        ]

    def _encode(self, texts: Sequence[str], *, special: bool) -> list[Tokens]:
        with _in_words(f"{self.path} cannot tokenize the text", UNKNOWN_HINT):
            found: list[Encoding] = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)
        return self._checked(found)

    def _checked(self, found: list[Encoding]) -> list[Tokens]:
        tokens = [np.array(encoding.ids, dtype=np.uint32) for encoding in found]
        highest = max((int(of_text.max()) for of_text in tokens if of_text.size), default=0)
        if highest >= self.size:
            # A post-processor may add what the vocabulary does not have.
            raise FlopwiseError(
                f"{self.path} does not know its own token {highest:,}",
                why=f"the last of its vocabulary is {self.size - 1:,}",
                hint="name the model's own tokenizer.json",
            )
        return [of_text.astype(token_type(self.size)) for of_text in tokens]


def _config_beside(path: Path) -> dict[str, Any]:
    """The tokenizer_config.json beside a tokenizer; nothing where there is none."""
    beside = path.with_name("tokenizer_config.json")
    # It says what ends a text: without it something else would be learned.
    return _table_of(beside) if entry_kind(beside) == "file" else {}


def _table_of(path: Path) -> dict[str, Any]:
    try:
        return read_table(path)
    except FlopwiseError as error:
        raise error.reword(error.what, why=error.why, hint="fetch the file again, or save the tokenizer anew") from None


def _read_template(folder: Path) -> str | None:
    """What files of their own hold as a chat template."""
    for name in ("chat_template.jinja", "chat_template.json"):
        if entry_kind(folder / name) != "file":
            continue
        if name.endswith(".jinja"):
            return read_text(folder / name)
        found = _table_of(folder / name).get("chat_template")
        if isinstance(found, str):
            return found
    return None


def _token(written: object) -> str:
    """A special token as a configuration has it: its text, or an object with it."""
    text = written.get("content") if isinstance(written, dict) else written
    return text if isinstance(text, str) else ""


def byte_tokenizer_files(*, marked: bool, masked: bool = False) -> dict[str, bytes]:
    """The byte tokenizer as files that others read; `marked`: its end stands in front of every sample; `masked`: it has
    a token for what is hidden.
    """
    end = "<|endoftext|>"
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    # The letters that GPT-2 writes bytes as.
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    hidden = {"content": BYTE_MASK, **flags}
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": end, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            {"SpecialToken": {"id": end, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": end, "type_id": 1}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {end: {"id": end, "ids": [256], "tokens": [end]}},
    }
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    table = {
        "version": "1.0",
        "added_tokens": [{"id": 256, "content": end, **flags}, *([{"id": 257, **hidden}] if masked else [])],
        "pre_tokenizer": level,
        "post_processor": template if marked else None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {letters[byte]: byte for byte in range(256)}, "merges": []},
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    if masked:
        config["mask_token"] = BYTE_MASK
    return {
        "tokenizer.json": msgspec.json.encode(table),
        "tokenizer_config.json": msgspec.json.encode(config),
    }


@contextmanager
def _in_words(what: str, hint: str) -> Iterator[None]:
    """Whatever the library says of a file, as a user's mistake."""
    try:
        yield
    except BaseException as error:
        # It raises nothing narrower than Exception, and where its Rust code panics something that is not even that.
        if not isinstance(error, Exception) and type(error).__module__ != PANIC_MODULE:
            raise
        raise FlopwiseError(what, why=str(error)[:LONGEST_REASON], hint=hint) from None


def _content(path: Path) -> bytes:
    try:
        return read_bounded(path, MOST_FILE_BYTES)
    except FlopwiseError as error:
        raise error.within(str(path), hint="name a tokenizer.json") from None
    except FileNotFoundError:
        raise FlopwiseError(
            f"there is no tokenizer {path}", hint="name a tokenizer.json, its folder, or none to train on bytes"
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise FlopwiseError(f"{shown(str(path))} cannot be read", why=reason, hint="name a tokenizer.json") from None
