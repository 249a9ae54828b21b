"""The fake engine says what it is told to, as a real engine would say it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf.errors import ConfigError, EngineError, RolloutError
from rlhf.rollout import CharCodec, FakeEngine, FakeResponse, FinishReason, Rollout, SamplingParams, encode_prompts

ONCE = SamplingParams()


def _ids(rollout: Rollout) -> list[list[int]]:
    return [ids[:length].tolist() for ids, length in zip(rollout.response_ids, rollout.lengths, strict=True)]


def test_it_works_without_a_tokenizer_and_without_a_script() -> None:
    rollout = FakeEngine().generate("2+2=", ONCE)
    assert rollout.texts == ["ok"]
    assert rollout.raw_texts == ["ok<eos>"]
    assert rollout.finish_reasons == [FinishReason.STOP]
    assert rollout.lengths.tolist() == [3]
    assert rollout.logprobs is not None
    assert rollout.logprobs.tolist() == [[-1.0, -1.0, -1.0]]
    assert rollout.rows == [{"prompt": "2+2="}]


def test_n_responses_of_a_prompt_come_together_and_share_a_group() -> None:
    rollout = FakeEngine(responses=["a", "b", "c"]).generate(["p", "q"], SamplingParams(n=2))
    assert rollout.texts == ["a", "b", "c", "a"]
    assert rollout.group.tolist() == [0, 0, 1, 1]
    assert rollout.episode.tolist() == [0, 1, 2, 3]
    assert [row["prompt"] for row in rollout.rows] == ["p", "p", "q", "q"]


def test_a_list_goes_on_where_the_last_call_ended() -> None:
    engine = FakeEngine(responses=["a", "b", "c"])
    assert engine.generate(["p", "q"], ONCE).texts == ["a", "b"]
    assert engine.generate(["p", "q"], ONCE).texts == ["c", "a"]


@pytest.mark.parametrize(
    "prompts, texts",
    [
        (["2+2=", "1+1=", "2+2="], ["4", "2", "four"]),
        ([[{"role": "system", "content": "sum"}, {"role": "user", "content": "2+2="}]], ["4"]),
        ([CharCodec().encode("2+2=")], ["4"]),
        ([SimpleNamespace(ids=[9, 9], row={"prompt": "1+1="})], ["2"]),
    ],
    ids=["text, cycled for each prompt", "the last message of a chat", "decoded ids", "the row's prompt"],
)
def test_a_dict_answers_by_prompt(prompts: Any, texts: list[str]) -> None:
    assert FakeEngine(responses={"2+2=": ["4", "four"], "1+1=": "2"}).generate(prompts, ONCE).texts == texts


def test_a_prompt_that_the_dict_does_not_know_is_named() -> None:
    with pytest.raises(EngineError, match="no response for the prompt '3'; it knows '1', '2'"):
        FakeEngine(responses={"1": ["a"], "2": ["b"]}).generate("3", ONCE)
    with pytest.raises(EngineError, match="empty list for the prompt '1'"):
        FakeEngine(responses={"1": []}).generate("1", ONCE)


def test_a_function_gets_prompt_sample_and_a_seed_of_its_own() -> None:
    seen = []

    def answer(prompt: Any, sample: int, seed: int | None) -> str:
        seen.append((prompt.text, prompt.row["prompt"], prompt.ids, sample, seed))
        return f"{prompt.text}{sample}"

    rollout = FakeEngine(responses=answer).generate(["p", "q"], SamplingParams(n=2, seed=10))
    assert rollout.texts == ["p0", "p1", "q0", "q1"]
    assert seen == [
        ("p", "p", CharCodec().encode("p"), 0, 10),
        ("p", "p", CharCodec().encode("p"), 1, 11),
        ("q", "q", CharCodec().encode("q"), 0, 12),
        ("q", "q", CharCodec().encode("q"), 1, 13),
    ]
    seen.clear()
    FakeEngine(responses=answer).generate("p", SamplingParams(n=2))
    assert [entry[-1] for entry in seen] == [None, None]


@pytest.mark.parametrize(
    "answer", [[5, 6, 7], (5, 6, 7), torch.tensor([5, 6, 7]), FakeResponse([5, 6, 7])], ids=["list", "tuple", "tensor", "response"]
)
def test_scripted_ids_are_returned_as_they_are(answer: Any) -> None:
    for script in ([answer], {"p": [answer]}, lambda prompt, sample, seed: answer):
        rollout = FakeEngine(responses=script).generate("p", ONCE)
        assert _ids(rollout) == [[5, 6, 7]]
        assert rollout.finish_reasons == [FinishReason.STOP]


def test_one_response_of_ids_for_a_prompt_needs_no_list() -> None:
    assert _ids(FakeEngine(responses={"p": [5, 6]}).generate("p", SamplingParams(n=2))) == [[5, 6], [5, 6]]


@pytest.mark.parametrize(
    "response, sampling, ids, reason",
    [
        ("abc", SamplingParams(max_new_tokens=2), [99, 100], "length"),
        ("abc", SamplingParams(max_new_tokens=3), [99, 100, 101], "length"),
        ("abc", SamplingParams(max_new_tokens=4), [99, 100, 101, 1], "stop"),
        ("", SamplingParams(max_new_tokens=1), [1], "stop"),
        ([5, 6, 7, 8], SamplingParams(stop_token_ids=(7,)), [5, 6, 7], "stop"),
        ([5, 6, 32007, 1, 1], SamplingParams(stop_token_ids=(32007, 32001, 32000)), [5, 6, 32007], "stop"),
        ([5, 1, 7], ONCE, [5, 1], "stop"),
        ([5, 6, 7, 8], SamplingParams(stop_token_ids=(7,), max_new_tokens=2), [5, 6], "length"),
        ([5, 6, 7, 8], SamplingParams(stop_token_ids=(7,), max_new_tokens=3), [5, 6, 7], "stop"),
        ("a</b>c", SamplingParams(stop="</b>"), CharCodec().encode("a</b>"), "stop"),
        ("a</b>c", SamplingParams(stop=["z", "<"]), CharCodec().encode("a<"), "stop"),
        (FakeResponse("ab", finish_reason="abort"), ONCE, [99, 100], "abort"),
        (FakeResponse([], finish_reason=FinishReason.ERROR), ONCE, [], "error"),
        (FakeResponse("abc", finish_reason="abort"), SamplingParams(max_new_tokens=1), [99], "length"),
    ],
    ids=[
        "cut",
        "cut before the end token",
        "just fits",
        "an end token alone",
        "a stop token",
        "one of several stop tokens",
        "the end token inside ids",
        "cut before the stop token",
        "stops on the last token allowed",
        "a stop string stays",
        "the first stop string that comes",
        "scripted abort has no end token",
        "scripted error",
        "cut comes first",
    ],
)
def test_a_response_ends_where_a_real_engine_would_end_it(response: Any, sampling: SamplingParams, ids: list[int], reason: str) -> None:
    rollout = FakeEngine(responses=[response]).generate("p", sampling)
    assert _ids(rollout) == [ids]
    assert rollout.finish_reasons == [FinishReason(reason)]


def test_stop_text_is_in_the_text_and_in_the_ids() -> None:
    rollout = FakeEngine(responses=["4</answer> and more"]).generate("p", SamplingParams(stop="</answer>"))
    assert rollout.texts == ["4</answer>"]


def test_log_probabilities_are_scripted_constant_or_absent() -> None:
    scripted = FakeEngine(responses=[FakeResponse("ab", logprobs=[-0.5, -0.25, -0.125]), "ab"], logprob=-2.0)
    rollout = scripted.generate("p", SamplingParams(n=2))
    assert rollout.logprobs is not None
    assert rollout.logprobs.tolist() == [[-0.5, -0.25, -0.125], [-2.0, -2.0, -2.0]]
    cut = scripted.generate("p", SamplingParams(n=2, max_new_tokens=2)).logprobs
    assert cut is not None
    assert cut.tolist() == [[-0.5, -0.25], [-2.0, -2.0]]
    assert FakeEngine(logprob=None).generate("p", ONCE).logprobs is None


def test_scripted_log_probabilities_must_count_the_end_token() -> None:
    with pytest.raises(RolloutError, match="one log-probability for each of its 3 tokens, got 2; a text has one more token than it seems"):
        FakeEngine(responses=[FakeResponse("ab", logprobs=[-0.5, -0.25])]).generate("p", ONCE)


def test_sampling_options_are_recorded_in_the_rollout_and_the_log() -> None:
    engine = FakeEngine()
    sampling = SamplingParams(temperature=0.5, top_p=0.9)
    rollout = engine.generate("p", sampling)
    assert rollout.temperature.tolist() == [0.5]
    assert rollout.filtered.tolist() == [True]
    (call,) = engine.calls
    assert call.method == "generate"
    assert call.sampling is sampling
    assert call.prompts is not None
    assert [prompt.text for prompt in call.prompts] == ["p"]


def test_a_response_shorter_than_min_new_tokens_is_refused() -> None:
    with pytest.raises(EngineError, match="has 3 tokens and min_new_tokens is 4"):
        FakeEngine().generate("p", SamplingParams(min_new_tokens=4))


def test_weights_are_taken_when_their_version_differs() -> None:
    engine = FakeEngine()
    actor = SimpleNamespace(weight_version=0)
    assert engine.generate("p", ONCE, weights=actor).weight_version.tolist() == [0]
    actor.weight_version = 3
    assert engine.generate("p", ONCE, weights=actor).weight_version.tolist() == [3]
    assert engine.generate("p", ONCE, weights=actor).weight_version.tolist() == [3]
    assert engine.generate("p", ONCE).weight_version.tolist() == [3]
    assert [call.method for call in engine.calls] == ["generate", "update_weights", "generate", "generate", "generate"]
    assert [call.weight_version for call in engine.calls] == [0, 3, 3, 3, 3]


def test_a_source_without_a_version_counts_up() -> None:
    engine = FakeEngine()
    engine.update_weights(object())
    engine.update_weights(object())
    assert engine.weight_version == 2


def test_generate_wakes_a_sleeping_engine() -> None:
    engine = FakeEngine()
    engine.sleep()
    assert engine.asleep
    engine.generate("p", ONCE)
    assert not engine.asleep
    engine.sleep()
    engine.wake()
    assert [call.method for call in engine.calls] == ["sleep", "wake", "generate", "sleep", "wake"]


def test_a_closed_engine_refuses_and_may_be_closed_twice() -> None:
    with FakeEngine() as engine:
        engine.generate("p", ONCE)
    engine.close()
    assert [call.method for call in engine.calls] == ["generate", "close"]
    for use in (lambda: engine.generate("p", ONCE), lambda: engine.update_weights(object()), engine.sleep, engine.wake):
        with pytest.raises(EngineError, match="closed; make a new one"):
            use()


def test_both_ways_to_generate_work_inside_a_running_event_loop() -> None:
    async def main() -> list[str]:
        engine = FakeEngine(responses=lambda prompt, sample, seed: prompt.text.upper())
        direct = engine.generate("a", ONCE).texts
        many = await asyncio.gather(*(engine.agenerate(text, ONCE) for text in "bcd"))
        return direct + [text for rollout in many for text in rollout.texts]

    assert asyncio.run(main()) == ["A", "B", "C", "D"]


def test_the_same_calls_give_the_same_rollouts() -> None:
    def run() -> Rollout:
        engine = FakeEngine(responses=["a", "bb", "ccc"])
        return Rollout.concat([engine.generate(["p", "q"], SamplingParams(n=2)), engine.generate("r", ONCE)])

    first, second = run(), run()
    assert first.response_ids.equal(second.response_ids)
    assert first.texts == second.texts == ["a", "bb", "ccc", "a", "bb"]


def test_a_real_tokenizer_encodes_and_its_end_token_is_added(bpe: Any) -> None:
    rollout = FakeEngine(bpe, ["hello world"]).generate([{"role": "user", "content": "hello"}], ONCE)
    assert _ids(rollout) == [[*bpe("hello world").input_ids, bpe.eos_token_id]]
    assert rollout.texts == ["hello world"]


def test_a_real_tokenizer_without_an_end_token_adds_none(bpe: Any) -> None:
    from transformers import PreTrainedTokenizerFast

    plain = PreTrainedTokenizerFast(tokenizer_object=bpe.backend_tokenizer)
    assert _ids(FakeEngine(plain, ["hello"]).generate("hello", ONCE)) == [bpe("hello").input_ids]


@pytest.mark.parametrize("script", ["ok", FakeResponse("ok"), [], {}], ids=["str", "response", "empty list", "empty dict"])
def test_a_script_must_be_a_list_a_dict_or_a_function(script: Any) -> None:
    with pytest.raises(ConfigError, match="responses must"):
        FakeEngine(responses=script)


@pytest.mark.parametrize("answer", [3, None])
def test_a_function_must_return_a_response(answer: Any) -> None:
    with pytest.raises(EngineError, match="must be text, token ids or a FakeResponse"):
        FakeEngine(responses=lambda prompt, sample, seed: answer).generate("p", ONCE)


def test_an_unreadable_prompt_is_named_as_by_any_engine() -> None:
    with pytest.raises(RolloutError, match="prompt 1"):
        FakeEngine().generate(["p", ""], ONCE)


@pytest.mark.parametrize("text", ["", "plain", "é日\U0001f600", "<eos> as text", "\n\t\x00"])
def test_the_character_codec_gives_back_every_text(text: str) -> None:
    codec = CharCodec()
    ids = codec(text)["input_ids"]
    assert len(ids) == len(text)
    assert codec.decode([*ids, 1], skip_special_tokens=True) == text
    assert codec.decode([*ids, 1]) == text + "<eos>"


def test_the_character_codec_shows_ids_beyond_unicode_as_replacement() -> None:
    assert CharCodec().decode([0x110000 + 2, 99]) == "\ufffda"


def test_the_character_codec_writes_chats() -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    codec = CharCodec()
    assert codec.apply_chat_template(chat, tokenize=False) == "<user>hi</user><assistant>ho</assistant>"
    assert codec.apply_chat_template(chat, tokenize=False, continue_final_message=True) == "<user>hi</user><assistant>ho"
    assert codec.apply_chat_template(chat[:1], add_generation_prompt=True) == encode_prompts(chat[:1], codec)[0][0].tolist()
    assert codec.apply_chat_template(chat[:1], return_dict=True) == {"input_ids": codec.encode("<user>hi</user>")}
