"""The study's text, tokenizer and decoder; nothing is downloaded unless a Hub name is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, set_seed

from ..calibration.text import read_documents, token_sequences
from ..errors import AAHError
from .config import WIKITEXT, StudyConfig

END_OF_TEXT = "<|endoftext|>"
HOLD_OUT = 10  # every tenth document, or the last tenth of the sequences, is for validation


def texts(config: StudyConfig) -> tuple[list[str], list[str]]:
    """(training, validation) documents; no validation ones where the source is a single document.

    Raises:
        AAHError: the source is missing or cannot be downloaded.
    """
    if config.data == "":
        from pydoc_data.topics import topics

        documents = [topics[name] for name in sorted(topics)]
        return [d for i, d in enumerate(documents) if i % HOLD_OUT], documents[::HOLD_OUT]
    if config.data == WIKITEXT:
        try:
            from datasets import load_dataset

            data = load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1")
        except (ImportError, OSError, ValueError) as error:
            raise AAHError(
                f"WikiText-2 could not be loaded ({error}). It needs `pip install datasets` and a connection or a warm "
                "cache; or pass a text file with --data."
            ) from error
        return list(data["train"]["text"]), list(data["validation"]["text"])
    path = Path(config.data)
    if path.suffix not in (".txt", ".jsonl") or not path.is_file():
        raise AAHError(f"data is {config.data!r}; expected an existing .txt or .jsonl file, or {WIKITEXT!r}.")
    documents = list(read_documents(path))
    held = documents[::HOLD_OUT] if len(documents) >= 2 * HOLD_OUT else []
    return [d for i, d in enumerate(documents) if i % HOLD_OUT or not held], held


def tokenizer_of(config: StudyConfig, training: Sequence[str], folder: Path) -> Any:
    """The tokenizer, trained once and kept in `folder`; call on one process first, then on the others.

    Raises:
        AAHError: a given tokenizer cannot be loaded.
    """
    if config.tokenizer:
        try:
            return AutoTokenizer.from_pretrained(config.tokenizer)
        except (OSError, ValueError) as error:
            raise AAHError(f"the tokenizer {config.tokenizer!r} cannot be loaded: {error}") from error
    if not (folder / "tokenizer.json").exists():
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=config.vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(training, trainer)
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)
        fast.save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def sequences_of(config: StudyConfig, tokenizer: Any, training: list[str], validation: list[str]) -> tuple[list, list]:
    """(training, validation) sequences of `seq_len` token ids.

    Raises:
        CalibrationError: too little text for a batch and a validation sequence.
    """

    def cut(documents: list[str], at_least: int, at_most: int | None = None) -> list[Tensor]:
        return token_sequences(
            documents, seq_len=config.seq_len, tokenizer=tokenizer, at_least=at_least, at_most=at_most
        )

    if validation:
        return cut(training, config.batch_size), cut(validation, 1, config.eval_sequences)
    both = cut(training, config.batch_size + 1)
    held = min(max(1, len(both) // HOLD_OUT), config.eval_sequences)
    return both[:-held], both[-held:]


def decoder(config: StudyConfig, vocab_size: int, seed: int) -> Any:
    """A decoder with random weights; equal seeds give equal weights, whatever the regime."""
    settings = AutoConfig.for_model(
        config.family,
        vocab_size=vocab_size,
        hidden_size=config.width,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads or config.heads,
        head_dim=config.width // config.heads,
        max_position_embeddings=config.seq_len,
        tie_word_embeddings=config.tied,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    set_seed(seed)
    return AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa")
