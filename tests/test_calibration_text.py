"""Every accepted form of calibration data, recall text, and what happens when there is too little."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aah_hf import CalibrationConfig, CalibrationError
from aah_hf.calibration import prepare, recall_sequences, token_sequences
from aah_hf.calibration.recall_words import KEYS, TEMPLATES, WORDS


class Bytes:
    """A tokenizer of UTF-8 bytes; 256 ends a text, 257 (where wanted) begins one."""

    eos_token_id = 256
    vocab = 258

    def __init__(self, begins: bool = False):
        self.begins = begins

    def __call__(self, text, add_special_tokens=True, **_):
        ids = list(text.encode())
        return {"input_ids": [257, *ids] if self.begins and add_special_tokens else ids}

    def decode(self, ids, **_):
        return bytes(i for i in ids if i < 256).decode(errors="replace")


def flat(sequences) -> list[int]:
    return torch.cat(sequences).tolist()


TEXTS = ["abcde", "fghij", "klmno"]


def test_strings_are_joined_with_the_end_of_text_token_and_cut():
    sequences = token_sequences(TEXTS, seq_len=4, tokenizer=Bytes())
    assert all(ids.shape == (4,) and ids.dtype == torch.int64 for ids in sequences)
    expected = [*b"abcde", 256, *b"fghij", 256, *b"klmno", 256]
    assert flat(sequences) == expected[: 4 * (len(expected) // 4)]


def test_every_sequence_begins_as_the_tokenizer_begins_a_text():
    sequences = token_sequences(TEXTS, seq_len=4, tokenizer=Bytes(begins=True))
    assert [ids[0].item() for ids in sequences] == [257] * len(sequences)
    assert [i for ids in sequences for i in ids[1:].tolist()][:7] == [*b"abcde", 256, *b"f"]


ROWS = [[1, 2, 3, 4], [5, 6, 7, 8]]


def loader(dataset, **options):
    return torch.utils.data.DataLoader(dataset, batch_size=2, **options)


def as_dataset(columns):
    return pytest.importorskip("datasets").Dataset.from_dict(columns)


TOKEN_FORMS = {
    "2-D tensor": lambda: torch.tensor(ROWS),
    "1-D tensor": lambda: torch.tensor([*ROWS[0], *ROWS[1]]),
    "int32 tensor": lambda: torch.tensor(ROWS, dtype=torch.int32),
    "numpy array": lambda: np.array(ROWS),
    "list of 1-D tensors": lambda: [torch.tensor(row) for row in ROWS],
    "list of 2-D tensors": lambda: [torch.tensor([row]) for row in ROWS],
    "list of lists": lambda: ROWS,
    "one list of ints": lambda: [*ROWS[0], *ROWS[1]],
    "generator": lambda: (torch.tensor(row) for row in ROWS),
    "dict batch": lambda: {"input_ids": torch.tensor(ROWS)},
    "list of dict batches": lambda: [{"input_ids": torch.tensor([row])} for row in ROWS],
    "list of dicts of lists": lambda: [{"input_ids": row} for row in ROWS],
    "right padding": lambda: [
        {
            "input_ids": torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0]]),
            "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]),
        },
        {"input_ids": torch.tensor([[6, 7, 8]]), "attention_mask": torch.tensor([[1, 1, 1]])},
    ],
    "left padding": lambda: {"input_ids": [[0, 1, 2, 3], [4, 5, 6, 7]], "attention_mask": [[0, 1, 1, 1], [1, 1, 1, 1]]},
    "ragged batch": lambda: {
        "input_ids": [[1, 2, 3], [4, 5, 6, 7, 8, 0]],
        "attention_mask": [[1, 1, 1], [1, 1, 1, 1, 1, 0]],
    },
    "DataLoader of tensors": lambda: loader(torch.tensor(ROWS)),
    "DataLoader of TensorDataset": lambda: loader(torch.utils.data.TensorDataset(torch.tensor(ROWS))),
    "DataLoader of dicts": lambda: loader([{"input_ids": torch.tensor(row)} for row in ROWS]),
    "datasets column": lambda: as_dataset({"input_ids": ROWS, "attention_mask": [[1] * 4] * 2}),
}


@pytest.mark.parametrize("form", TOKEN_FORMS)
def test_every_form_of_token_ids_is_read(form):
    data = TOKEN_FORMS[form]()
    sequences = token_sequences(data, seq_len=2, vocab_size=100)
    expected = [1, 2, 3, 4, 5, 6, 7, 8][: 2 * len(sequences)]
    assert flat(sequences) == expected and len(sequences) >= 3


@pytest.mark.parametrize("form", ["txt", "jsonl", "path object", "datasets", "DataLoader", "dicts", "batches of text"])
def test_every_form_of_text_is_read(form, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("abcdefghij")
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": t, "id": 1}) + "\n\n" for t in TEXTS))
    data = {
        "txt": lambda: str(text),
        "jsonl": lambda: str(lines),
        "path object": lambda: lines,
        "datasets": lambda: as_dataset({"text": TEXTS}),
        "DataLoader": lambda: loader(TEXTS),
        "dicts": lambda: [{"text": t} for t in TEXTS],
        "batches of text": lambda: [{"text": TEXTS}],
    }[form]()
    expected = [*b"abcdefghij", 256] if form == "txt" else [*b"abcde", 256, *b"fghij", 256, *b"klmno", 256]
    sequences = token_sequences(data, seq_len=3, tokenizer=Bytes())
    assert flat(sequences) == expected[: 3 * (len(expected) // 3)]


def test_reading_stops_when_there_is_enough():
    def endless():
        while True:
            yield "abcdefgh"

    assert len(token_sequences(endless(), seq_len=4, tokenizer=Bytes(), at_most=5)) == 5


def test_a_text_longer_than_one_piece_is_not_cut_apart():
    text = "".join(chr(97 + i % 26) for i in range(300_000))
    assert bytes(flat(token_sequences([text], seq_len=100_000, tokenizer=Bytes()))).decode() == text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "empty"),
        ({"input_ids": torch.zeros(0, dtype=torch.long)}, "empty|no tokens"),
        ([torch.zeros(0, dtype=torch.long)], "empty|no tokens"),
        (["", ""], "empty"),
        (TEXTS, "tokenizer"),
        ([[1, 2], "text"], "tokenizer"),
        ([torch.tensor([1.5, 2.5])], "expected integers"),
        ([torch.zeros(1, 1, 1, dtype=torch.long)], "shape"),
        ([[1, 2, 3, 400]], "400"),
        ([[1, -1]], "-1"),
        (object(), "object"),
        (b"bytes", "bytes"),
        (7, "int"),
        ([3.5], "float"),
        ([None], "NoneType"),
        ([{"ids": [1, 2]}], "input_ids"),
        ({"input_ids": torch.ones(2, 3, dtype=torch.long), "attention_mask": torch.ones(2, 2)}, "attention_mask"),
        ([[torch.tensor([[1, 2]]), torch.tensor([[3, 4]])]], "input_ids"),
        ("just some text", r"\[text\]"),
        ("/nowhere/at_all.txt", "cannot be read"),
    ],
)
def test_data_that_cannot_be_used_says_why(data, message):
    with pytest.raises(CalibrationError, match=message):
        token_sequences(data, seq_len=2, vocab_size=100)


@pytest.mark.parametrize(
    ("content", "message"),
    [('{"text": "a"}\n{bad', "line 2"), ('{"body": "a"}', '"text"'), ("[1]", '"text"'), ("", "empty")],
)
def test_a_malformed_jsonl_file_names_the_line(tmp_path, content, message):
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(CalibrationError, match=message):
        token_sequences(path, seq_len=1, tokenizer=Bytes())


def test_a_file_is_not_read_beyond_its_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr("aah_hf.calibration.text.MAX_FILE_BYTES", 10)
    path = tmp_path / "long.txt"
    path.write_text("x" * 1000)
    assert len(flat(token_sequences(path, seq_len=1, tokenizer=Bytes()))) == 11  # ten bytes and the end of the text
    monkeypatch.setattr("aah_hf.calibration.text.MAX_LINE_BYTES", 8)
    path = tmp_path / "line.jsonl"
    path.write_text(json.dumps({"text": "y" * 100}))
    with pytest.raises(CalibrationError, match="longer than 8 bytes"):
        token_sequences(path, seq_len=1, tokenizer=Bytes())


def test_too_little_data_says_how_much_there_is_and_how_much_is_needed():
    with pytest.raises(CalibrationError, match=r"12 tokens.* 16 are needed.*\(at most 6\)"):
        token_sequences(torch.arange(12), seq_len=8, at_least=2)
    config = CalibrationConfig(seq_len=64, candidates=(8,), recall_fraction=0)
    with pytest.raises(CalibrationError, match=r"100 tokens.* 128 are needed"):
        prepare(torch.zeros(100, dtype=torch.long), config)


@pytest.mark.parametrize("split", ["calibration", "evaluation"])
@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("seq_len", [200, 2048, 4000])
def test_recall_text_asks_for_facts_at_known_distances(split, begins, seq_len):
    for item in recall_sequences(Bytes(begins), 3, seq_len=seq_len, seed=1, split=split):
        assert item.ids.shape == item.answers.shape == (seq_len,)
        starts = (item.answers & ~torch.cat([torch.zeros(1, dtype=torch.bool), item.answers[:-1]])).nonzero()[:, 0]
        assert len(starts) == len(item.distances) >= 1
        for start, distance in zip(starts.tolist(), item.distances):
            length = int(item.answers[start:].to(torch.int8).argmin())
            answer = item.ids[start : start + length]
            assert torch.equal(answer, item.ids[start - distance : start - distance + length])
            assert not item.answers[start - distance]
        assert not item.answers[: seq_len // 3].any() and (item.ids[0] == 257) == begins
    if seq_len == 2048:
        assert max(item.distances) > 1000 and len(item.distances) > 5


def test_calibration_and_evaluation_recall_share_nothing():
    assert sum(map(len, TEMPLATES.values())) >= 20
    for shared in (TEMPLATES, KEYS, WORDS):
        assert not set(shared["calibration"]) & set(shared["evaluation"])
    answers = {}
    for split in ("calibration", "evaluation"):
        items = recall_sequences(Bytes(), 8, seq_len=2048, split=split)
        answers[split] = {
            bytes(part).decode()
            for item in items
            for part in bytes(np.where(item.answers, item.ids, 0).astype(np.uint8)).split(b"\0")
            if part
        }
    assert len(answers["calibration"]) > 40 and not answers["calibration"] & answers["evaluation"]


def test_recall_text_is_made_from_a_seed_and_from_the_users_text():
    first, same, other = (recall_sequences(Bytes(), 2, seq_len=600, seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(first, same))
    assert not torch.equal(first[0].ids, other[0].ids)
    own = recall_sequences(Bytes(), 2, seq_len=600, haystack=[1] * 250)
    assert (own[0].ids == 1).sum() > 100 and (own[1].ids == 1).sum() == 0  # only enough for one


def test_facts_are_planted_between_sentences():
    hay = list(b"Here is one sentence. " * 200)
    item = recall_sequences(Bytes(), 1, seq_len=3000, haystack=hay)[0]
    text = Bytes().decode(item.ids.tolist())
    planted = [line for line in text.split("\n") if line.endswith("sentence.")]
    assert len(planted) >= len(item.distances) - 1


def test_recall_text_that_does_not_fit_says_so():
    with pytest.raises(CalibrationError, match="too short for recall text"):
        recall_sequences(Bytes(), 1, seq_len=40)
    with pytest.raises(CalibrationError, match="evaluation"):
        recall_sequences(Bytes(), 1, seq_len=400, split="test")


def test_half_of_the_sequences_are_recall_text_and_some_are_held_out():
    config = CalibrationConfig(seq_len=512, num_sequences=6, holdout_sequences=2, recall_fraction=0.5)
    data = [" ".join(str(i) for i in range(20_000))]
    text = prepare(data, config, tokenizer=Bytes(), vocab_size=258)
    assert len(text.measure) == 6 and text.recall_count == 3 and text.tokens == 6 * 512
    assert len(text.holdout) == 2 and len(text.holdout_recall) == 2
    body = [*data[0].encode()]
    assert flat([*text.measure[:3], *text.holdout]) == body[: 5 * 512]
    assert all(mask.any() and ids.shape == mask.shape == (512,) for ids, mask in text.holdout_recall)
    measured = {tuple(ids.tolist()) for ids in text.measure}
    assert not measured & {tuple(ids.tolist()) for ids in text.holdout}


@given(st.integers(1, 9), st.sampled_from([0, 0.25, 0.5, 1]), st.integers(0, 3), st.integers(0, 14))
def test_calibration_and_held_out_slices_never_overlap(num_sequences, recall_fraction, holdout, available):
    config = CalibrationConfig(
        seq_len=256,
        num_sequences=num_sequences,
        recall_fraction=recall_fraction,
        holdout_sequences=holdout,
    )
    data = torch.arange(256 * available) % 65_537
    plain = num_sequences - config.recall_sequences()
    if available < holdout + bool(plain) or not available:
        with pytest.raises(CalibrationError):
            prepare(data, config, tokenizer=Bytes())
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = prepare(data, config, tokenizer=Bytes())
    assert len(text.holdout) == holdout
    assert len(text.holdout_recall) == (holdout if config.recall_sequences() else 0)
    assert len(text.measure) == min(plain, available - holdout) + config.recall_sequences()
    used = flat([*text.measure[: len(text.measure) - text.recall_count], *text.holdout]) if available and plain else []
    assert used == data[: len(used)].tolist()


def test_without_tokenizer_the_data_is_used_alone_and_it_is_said_once():
    config = CalibrationConfig(seq_len=64, candidates=(8,), num_sequences=4)
    with pytest.warns(UserWarning, match="no tokenizer") as caught:
        text = prepare(torch.zeros(6, 64, dtype=torch.long), config)
    assert len(caught) == 1 and len(text.measure) == 4 and text.recall_count == 0 and not text.holdout_recall


def test_less_data_than_asked_for_is_used_with_a_warning():
    config = CalibrationConfig(seq_len=64, candidates=(8,), num_sequences=8, recall_fraction=0)
    with pytest.warns(UserWarning, match=r"fills 4 sequences .* 9 were asked for"):
        text = prepare(torch.zeros(4, 64, dtype=torch.long), config)
    assert len(text.measure) == 3 and len(text.holdout) == 1


def test_the_fingerprint_is_of_the_measured_tokens():
    config = CalibrationConfig(seq_len=64, candidates=(8,), num_sequences=2, recall_fraction=0)
    data = torch.arange(4 * 64)
    first = prepare(data, config).sha256
    assert first == prepare(data.clone(), config).sha256
    data[0] = 9
    assert first != prepare(data, config).sha256
