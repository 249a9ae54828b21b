"""Small real tokenizers, trained here on a few words."""

from __future__ import annotations

from typing import Any

import pytest

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As reasoning models do it: an assistant's thoughts leave the context as soon as another message follows.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _byte_level_bpe() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<bos>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello hello hello world the answer is 4 user assistant system"] * 20, trainer)
    return tokenizer


def _wrapped(**tokens: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(tokenizer_object=_byte_level_bpe(), eos_token="<|im_end|>", pad_token="<pad>", **tokens)
    wrapped.chat_template = CHATML
    return wrapped


@pytest.fixture(scope="session")
def bpe() -> Any:
    """Byte-level BPE with ChatML, end token <|im_end|>, no beginning-of-sequence token."""
    return _wrapped()


@pytest.fixture(scope="session")
def forgetful() -> Any:
    """The same with a template that drops the assistant's earlier thoughts."""
    tokenizer = _wrapped()
    tokenizer.chat_template = FORGETFUL
    return tokenizer


@pytest.fixture(scope="session")
def with_bos() -> Any:
    """The same, putting <bos> before every text."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = _wrapped(bos_token="<bos>")
    bos = tokenizer.convert_tokens_to_ids("<bos>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    return tokenizer
