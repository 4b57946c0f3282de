"""From whatever the user has to token sequences: forms of `calib_data`, packing, calibration and held-out slices."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import CalibrationError
from .config import CalibrationConfig
from .recall import encode, prefix_ids, recall_sequences

MAX_FILE_BYTES = 256 * 2**20
"""Of a longer file only the beginning is read."""
MAX_LINE_BYTES = 16 * 2**20
_PIECE = 2**17  # characters that are tokenised at once: reading stops as soon as there are enough tokens

FORMS = (
    "a list of strings (with a tokenizer), token-id tensors or lists of ints, dict batches with `input_ids`, a "
    "DataLoader of these, a datasets.Dataset with a `text` or `input_ids` column, or the path of a .txt or .jsonl file"
)


@dataclass(frozen=True)
class CalibrationText:
    """What a calibration runs on.

    Attributes:
        measure: sequences [seq_len] to measure heads on, the data's first, then recall text.
        holdout: sequences of the data that are not among them, to check the patched model with.
        holdout_recall: (ids, answers) of held-out recall text (evaluation templates); empty where `measure`
            has no recall text.
        sha256: of the token ids of `measure`.
    """

    measure: tuple[Tensor, ...]
    holdout: tuple[Tensor, ...]
    holdout_recall: tuple[tuple[Tensor, Tensor], ...]
    recall_count: int
    sha256: str

    @property
    def tokens(self) -> int:
        return sum(len(ids) for ids in self.measure)


def prepare(
    calib_data: Any, config: CalibrationConfig, *, tokenizer: Any = None, vocab_size: int | None = None
) -> CalibrationText:
    """Cut `calib_data` into calibration and held-out slices and mix in recall text.

    With less data than `config` asks for, fewer sequences are used, with a warning. Recall text hides its
    facts in what the data has left over, otherwise in built-in sentences.

    Raises:
        CalibrationError: unusable data, or not enough for one sequence to measure and the held-out ones.
    """
    recall, held = config.recall_sequences(), config.holdout_sequences
    if recall and tokenizer is None:
        warnings.warn(
            "no tokenizer was given, so recall text cannot be made and windows are chosen on the data alone. Pass "
            "tokenizer=... to calibrate for long-range recall too, or recall_fraction=0 to silence this.",
            stacklevel=2,
        )
        recall = 0
    plain = config.num_sequences - recall
    fewest = held + (1 if plain else 0)
    wanted = plain + held + recall + held
    sequences = token_sequences(
        calib_data,
        seq_len=config.seq_len,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        at_least=fewest,
        at_most=wanted,
    )
    if len(sequences) < plain + held:
        warnings.warn(
            f"the calibration data fills {len(sequences)} sequences of {config.seq_len} tokens and "
            f"{plain + held} were asked for; windows are chosen on {len(sequences) - held}.",
            stacklevel=2,
        )
        plain = len(sequences) - held
    measure, holdout = sequences[:plain], sequences[plain : plain + held]
    rest = torch.cat([*sequences[plain + held :], torch.empty(0, dtype=torch.long)]).tolist()
    made, kept = [], []  # with recall_fraction=0 nothing is asked of recall, at the check either
    if recall:
        split = min(len(rest), recall * config.seq_len)
        made, kept = (
            recall_sequences(tokenizer, count, seq_len=config.seq_len, seed=config.seed, split=name, haystack=hay)
            for count, name, hay in ((recall, "calibration", rest[:split]), (held, "evaluation", rest[split:]))
        )
    measure = [*measure, *(item.ids for item in made)]
    digest = hashlib.sha256(np.stack([ids.numpy().astype("<i8") for ids in measure]).tobytes()).hexdigest()
    return CalibrationText(
        tuple(measure), tuple(holdout), tuple((item.ids, item.answers) for item in kept), len(made), digest
    )


def token_sequences(
    calib_data: Any,
    *,
    seq_len: int,
    tokenizer: Any = None,
    vocab_size: int | None = None,
    at_least: int = 1,
    at_most: int | None = None,
) -> list[Tensor]:
    """Sequences of exactly `seq_len` token ids from any accepted form of data.

    Strings are tokenised, joined with the tokenizer's end-of-text token and cut; every sequence starts with the
    special tokens that the tokenizer starts a text with. Token ids are taken as they are, padding dropped,
    joined and cut. Reading stops as soon as there are `at_most` sequences.

    Returns:
        [seq_len] int64 tensors, in data order.

    Raises:
        CalibrationError: unknown form, missing or unreadable file, strings without a tokenizer, ids outside the
            vocabulary, empty data, or fewer than `at_least` sequences.
    """
    items = _items(calib_data)
    first = next(items, None)
    if first is None:
        raise CalibrationError(f"the calibration data is empty; pass {FORMS}.")
    prefix: list[int] = []
    if isinstance(first, str):
        if tokenizer is None:
            raise CalibrationError(
                "the calibration data is text; pass tokenizer=AutoTokenizer.from_pretrained(...) too."
            )
        prefix = prefix_ids(tokenizer)
    body = seq_len - len(prefix)
    sequences: list[Tensor] = []
    pending: list[int] = []
    total = 0
    for piece in _token_pieces(chain([first], items), tokenizer):
        if vocab_size is not None and piece and not (min(piece) >= 0 and max(piece) < vocab_size):
            raise CalibrationError(
                f"the calibration data has token ids from {min(piece)} to {max(piece)} and the model knows 0 to "
                f"{vocab_size - 1}; was it tokenised with another model's tokenizer?"
            )
        total += len(piece)
        pending += piece
        while len(pending) >= body:
            sequences.append(torch.tensor(prefix + pending[:body]))
            pending = pending[body:]
            if at_most is not None and len(sequences) >= at_most:
                return sequences
    if not total:
        raise CalibrationError(f"the calibration data has no tokens; pass {FORMS}.")
    if len(sequences) < at_least:
        raise CalibrationError(
            f"the calibration data has {total} tokens and at least {at_least * body} are needed ({at_least} "
            f"sequences of {seq_len}, held-out ones included). Pass more text, or use a shorter seq_len"
            f"{f' (at most {total // at_least})' if total >= 2 * at_least else ''}."
        )
    return sequences


def _token_pieces(items: Iterable[str | list[int]], tokenizer: Any) -> Iterator[list[int]]:
    """Token ids in small portions. Text pieces that end a document carry a separator, see `_items`."""
    eos = getattr(tokenizer, "eos_token_id", None)
    for item in items:
        if not isinstance(item, str):
            yield item
            continue
        if tokenizer is None:
            raise CalibrationError("the calibration data has text in it; pass a tokenizer too.")
        for start in range(0, len(item), _PIECE):
            yield encode(tokenizer, item[start : start + _PIECE])
        if eos is not None and item:
            yield [eos]


def _items(data: Any) -> Iterator[str | list[int]]:
    """Documents of any accepted form: text, or lists of token ids."""
    if isinstance(data, (str, os.PathLike)):
        yield from read_documents(data)
    elif isinstance(data, Mapping):
        yield from _batch(data)
    elif isinstance(data, (Tensor, np.ndarray)):
        yield from _rows(data)
    elif isinstance(data, (bytes, bytearray)):
        raise CalibrationError(f"calib_data is of type {type(data).__name__}; pass {FORMS}.")
    elif isinstance(data, Sequence) and data and all(_is_int(x) for x in data):
        yield list(map(int, data))
    elif isinstance(data, Iterable):
        for item in data:
            yield from _item(item)
    else:
        raise CalibrationError(f"calib_data is of type {type(data).__name__}; pass {FORMS}.")


def _item(item: Any) -> Iterator[str | list[int]]:
    """One element of a list, a DataLoader or a dataset."""
    if isinstance(item, str):
        if item:
            yield item
    elif isinstance(item, Mapping):
        yield from _batch(item)
    elif isinstance(item, (Tensor, np.ndarray)):
        yield from _rows(item)
    elif isinstance(item, Sequence) and not isinstance(item, (bytes, bytearray)):
        if all(_is_int(x) for x in item):
            yield list(map(int, item))
        elif len(item) == 1 or all(isinstance(x, str) or (isinstance(item, list) and _is_ids(x)) for x in item):
            for part in item:  # what a DataLoader makes of a list of texts, or of a TensorDataset of one tensor
                yield from _item(part)
        else:
            raise CalibrationError(
                f"an item of calib_data is a {type(item).__name__} of {type(item[0]).__name__} and others, and it is "
                "unclear which are the token ids; make your DataLoader return dicts with `input_ids`."
            )
    else:
        raise CalibrationError(f"an item of calib_data is of type {type(item).__name__}; pass {FORMS}.")


def _batch(batch: Mapping) -> Iterator[str | list[int]]:
    """A dict with `input_ids` (padding is dropped by `attention_mask`) or `text`: one row or a batch."""
    if "input_ids" in batch:
        ids = _array(batch["input_ids"])
        if isinstance(ids, list):  # rows of different lengths
            masks = batch.get("attention_mask")
            masks = [None] * len(ids) if masks is None else masks
            if len(masks) != len(ids):
                raise CalibrationError(
                    f"input_ids has {len(ids)} rows and attention_mask {len(masks)}; they must be alike."
                )
            for row, mask in zip(ids, masks):
                yield from _rows(row, None if mask is None else np.asarray(mask))
        else:
            mask = batch.get("attention_mask")
            yield from _rows(ids, None if mask is None else _array(mask))
    elif isinstance(batch.get("text"), str):
        yield from _item(batch["text"])
    elif isinstance(batch.get("text"), Sequence):
        for text in batch["text"]:
            yield from _item(text)
    else:
        raise CalibrationError(
            f"a dict of calib_data has the keys {sorted(map(str, batch))[:8]}; expected `input_ids` or `text`. "
            "Of a DatasetDict pass one split."
        )


def _array(value: Any) -> Any:
    """A NumPy array, or a list of them for rows of different lengths."""
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, (str, bytes)):
        raise CalibrationError(f"token ids are the string {value[:40]!r}; put text under `text`, or tokenise it.")
    if isinstance(value, Sequence) and value and not _is_int(value[0]):
        return [_array(row) for row in value]
    return np.asarray(value)


def _rows(ids: Any, mask: np.ndarray | None = None) -> Iterator[list[int]]:
    ids = _array(ids)
    if ids.size and not np.issubdtype(ids.dtype, np.integer):
        raise CalibrationError(
            f"token ids are of type {ids.dtype}; expected integers. For embeddings there is no support."
        )
    if ids.ndim not in (1, 2):
        raise CalibrationError(f"token ids have shape {ids.shape}; expected [tokens] or [rows, tokens].")
    if mask is not None and mask.shape != ids.shape:
        raise CalibrationError(f"attention_mask has shape {mask.shape} and input_ids {ids.shape}; they must be alike.")
    rows = ids if ids.ndim == 2 else ids[None]
    keep = np.ones_like(rows, dtype=bool) if mask is None else mask.reshape(rows.shape).astype(bool)
    for row, kept in zip(rows, keep):
        if kept.any():
            yield row[kept].tolist()


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_int, value))


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def read_documents(path: str | os.PathLike) -> Iterator[str]:
    """Documents of a .txt (one) or .jsonl file (one a line, field `text`)."""
    path = Path(path)
    if path.suffix not in (".txt", ".jsonl"):
        raise CalibrationError(
            f"calib_data is the string {str(path)[:80]!r}, which is taken as a path, and only .txt and .jsonl files "
            "are read. To calibrate on a text itself pass a list: [text]."
        )
    try:
        with path.open("rb") as file:
            if path.suffix == ".txt":
                yield file.read(MAX_FILE_BYTES).decode("utf-8", errors="replace")
                return
            read = 0
            for number in range(1, MAX_FILE_BYTES):
                line = file.readline(MAX_LINE_BYTES + 1)
                read += len(line)
                if len(line) > MAX_LINE_BYTES:
                    raise CalibrationError(f"line {number} of {path} is longer than {MAX_LINE_BYTES} bytes.")
                if not line or read > MAX_FILE_BYTES:
                    return
                if line.strip():
                    yield from _json_line(line, number, path)
    except OSError as error:
        raise CalibrationError(f"the calibration file {path} cannot be read: {error.strerror or error}.") from error


def _json_line(line: bytes, number: int, path: Path) -> Iterator[str]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"line {number} of {path} is not JSON: {error}.") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise CalibrationError(f'line {number} of {path} has no string field "text"; expected {{"text": "..."}}.')
    if text:
        yield text
