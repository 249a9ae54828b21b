"""Two small tokenizers with one id per character: one as chat models have it (ChatML), one that opens and closes every text."""

from __future__ import annotations

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
BOS, EOS, IM_START, IM_END = 1, 2, 3, 4


def character_tokenizer(
    *, encloses: bool = False, chat_template: str | None = CHATML, characters: str | None = None
) -> PreTrainedTokenizerFast:
    characters = "\n" + "".join(map(chr, range(32, 127))) if characters is None else characters
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    if encloses:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", additional_special_tokens=SPECIAL[3:]
    )
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Adds nothing to a text; has the ChatML template."""
    return character_tokenizer()


@pytest.fixture(scope="session")
def enclosing_tokenizer() -> PreTrainedTokenizerFast:
    """Opens every text with <s> and closes it with </s>; its template writes <s> itself."""
    return character_tokenizer(encloses=True, chat_template="<s>" + CHATML)
