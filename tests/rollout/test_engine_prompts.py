"""Prompts in any form become ids and a row, and what is no prompt is named by its number."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.data.prompts import Prompt, PromptDataset
from rlhf.errors import ModelError, RolloutError
from rlhf.rollout import CharCodec, FakeEngine, Rollout, RolloutEngine, SamplingParams, encode_prompts

CODEC = CharCodec()
CHAT = [{"role": "user", "content": "hi"}]
CHAT_IDS = CODEC.encode("<user>hi</user><assistant>")


@dataclass
class Lookalike:
    """What another library's prompt may look like."""

    ids: Any
    row: dict[str, Any]


@pytest.mark.parametrize(
    "prompts, expected",
    [
        ("hi", [(CODEC.encode("hi"), {"prompt": "hi"})]),
        (["hi", "ho"], [(CODEC.encode("hi"), {"prompt": "hi"}), (CODEC.encode("ho"), {"prompt": "ho"})]),
        (CHAT, [(CHAT_IDS, {"prompt": CHAT})]),
        ([CHAT, CHAT], [(CHAT_IDS, {"prompt": CHAT})] * 2),
        ([5, 6], [([5, 6], {})]),
        ((5, 6), [([5, 6], {})]),
        ([[5, 6], [7]], [([5, 6], {}), ([7], {})]),
        (torch.tensor([5, 6]), [([5, 6], {})]),
        ([torch.tensor([5, 6]), torch.tensor([7], dtype=torch.int32)], [([5, 6], {}), ([7], {})]),
        (Prompt(torch.tensor([5]), {"uid": "u"}), [([5], {"uid": "u"})]),
        ([Prompt(torch.tensor([5]), {"uid": "u"}), Prompt(torch.tensor([6]), {"uid": "v"})], [([5], {"uid": "u"}), ([6], {"uid": "v"})]),
        (Lookalike([5, 6], {"a": 1}), [([5, 6], {"a": 1})]),
        (
            ["hi", CHAT, [5], Lookalike([6], {})],
            [(CODEC.encode("hi"), {"prompt": "hi"}), (CHAT_IDS, {"prompt": CHAT}), ([5], {}), ([6], {})],
        ),
        ((text for text in ["hi"]), [(CODEC.encode("hi"), {"prompt": "hi"})]),
        (PromptDataset([{"prompt": "hi"}], CODEC)[:1], [(CODEC.encode("hi"), None)]),
        (PromptDataset([{"prompt": "hi"}, {"prompt": "ho"}], CODEC), [(CODEC.encode("hi"), None), (CODEC.encode("ho"), None)]),
    ],
    ids=[
        "text",
        "texts",
        "a chat",
        "chats",
        "ids",
        "a tuple of ids",
        "lists of ids",
        "a tensor",
        "tensors",
        "a Prompt",
        "Prompts",
        "an object with ids and row",
        "all mixed",
        "a generator",
        "a slice of a dataset",
        "a whole dataset",
    ],
)
def test_prompts_in_any_form_become_ids_and_rows(prompts: Any, expected: list[Any]) -> None:
    encoded = encode_prompts(prompts, CODEC)
    assert [ids.tolist() for ids, _ in encoded] == [ids for ids, _ in expected]
    assert all(ids.dtype == torch.int64 for ids, _ in encoded)
    for (_, row), (_, wanted) in zip(encoded, expected, strict=True):
        assert wanted is None or row == wanted


def test_the_row_of_a_prompt_is_the_very_dict_of_the_dataset() -> None:
    dataset = PromptDataset([{"prompt": "hi", "ground_truth": "4"}], CODEC)
    assert encode_prompts(dataset, CODEC)[0][1] is dataset[0].row


@pytest.mark.parametrize(
    "prompts, message",
    [
        ([], "prompts must hold at least one prompt, got none"),
        ("", "prompt 0"),
        (["hi", ""], "prompt 1"),
        ([[5], []], r"prompt 1 must have at least one token, got none"),
        (torch.tensor([], dtype=torch.int64), "prompt 0 must have at least one token"),
        ([Prompt(torch.tensor([5]), {}), Prompt(torch.tensor([], dtype=torch.int64), {})], "prompt 1 must have at least one token"),
        (torch.ones(2, 2, dtype=torch.int64), r"token ids of shape \[P\] or a list of such, got a tensor of shape \[2, 2\]; unpad it"),
        (torch.tensor([0.5]), r"prompt 0 must be integer token ids of shape \[P\], got float32 \[1\]"),
        ([[0.5, 1.5]], "prompt 0 must be text, chat messages, token ids or a Prompt, got a list of float"),
        ([5, "hi"], "prompt 0 must be text, chat messages, token ids or a Prompt, got int"),
        ([True, False], "prompt 0 must be .*got bool"),
        (["hi", None], "prompt 1 must be .*got NoneType"),
        ({"role": "user", "content": "hi"}, "got dict; put the message in a list"),
        ([{"prompt": "hi", "ground_truth": "4"}], "prompt 0 must be .*keys prompt, ground_truth; make rows into a PromptDataset"),
        (7, "prompts must be text, chat messages, token ids, Prompts or a list of these, got int"),
        (b"hi", "got bytes"),
        ([[{"role": "user", "content": "hi"}, {"text": "no role"}]], "prompt 0 must be .*a list of dict"),
        (Prompt(torch.tensor([5]), {}, {"pixel_values": torch.zeros(1)}), "prompt 0 must have token ids only, got further inputs"),
        ([[CHAT[0]], [{"role": "user", "content": ""}]], "prompt 1"),
    ],
)
def test_what_is_no_prompt_is_named_by_its_number(prompts: Any, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        encode_prompts(prompts, CODEC)


def test_text_without_a_tokenizer_is_refused_and_ids_are_not() -> None:
    with pytest.raises(RolloutError, match="prompt 0 is text, and this engine has no tokenizer"):
        encode_prompts("hi", None)
    assert encode_prompts([5], None)[0][0].tolist() == [5]


def test_text_gets_the_tokenizers_beginning_of_sequence_token(with_bos: Any) -> None:
    ids = encode_prompts("hello", with_bos)[0][0].tolist()
    assert ids == with_bos("hello").input_ids
    assert ids.count(with_bos.bos_token_id) == 1


def test_chats_use_the_template_with_the_assistants_header_and_no_second_bos(with_bos: Any) -> None:
    ids = encode_prompts(CHAT, with_bos)[0][0].tolist()
    assert with_bos.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_chat_for_a_tokenizer_without_a_template_says_so(bpe: Any) -> None:
    from transformers import PreTrainedTokenizerFast

    plain = PreTrainedTokenizerFast(tokenizer_object=bpe.backend_tokenizer, eos_token="<|im_end|>")
    with pytest.raises(ModelError, match="chat template"):
        encode_prompts(CHAT, plain)


def test_numpy_ids_come_in_a_prompt_object() -> None:
    assert encode_prompts(Lookalike(np.array([5, 6]), {}), CODEC)[0][0].tolist() == [5, 6]


class Slow(RolloutEngine):
    """The least a subclass must write."""

    tokenizer = CODEC

    def generate(self, prompts: Any, sampling: SamplingParams, *, weights: Any = None) -> Rollout:
        time.sleep(0.05)
        return FakeEngine().generate(prompts, sampling)

    def update_weights(self, source: Any) -> None:
        self.weight_version = source.weight_version


def test_a_subclass_with_two_methods_is_a_whole_engine() -> None:
    with Slow() as engine:
        engine.sleep()
        engine.wake()
        assert engine.weight_version == 0
        assert engine.generate("hi", SamplingParams()).texts == ["ok"]
    engine.close()


def test_waiting_for_an_engine_does_not_block_the_event_loop() -> None:
    async def main() -> int:
        ticks = 0
        task = asyncio.create_task(Slow().agenerate("hi", SamplingParams()))
        while not task.done():
            await asyncio.sleep(0.005)
            ticks += 1
        assert (await task).texts == ["ok"]
        return ticks

    assert asyncio.run(main()) >= 3


def test_an_engine_without_generate_cannot_be_made() -> None:
    class Unfinished(RolloutEngine):
        def update_weights(self, source: Any) -> None:
            pass

    with pytest.raises(TypeError, match="generate"):
        Unfinished()
