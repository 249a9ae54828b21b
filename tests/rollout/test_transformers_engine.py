"""The embedded engine: exact log-probabilities, the right end of a response, and weights shared with the trainer."""

from __future__ import annotations

import asyncio
import copy
import warnings
from typing import Any

import pytest
import torch

import rlhf
from rlhf import SamplingParams, TransformersEngine
from rlhf.errors import ConfigError, EngineError, ModelError, RLHFWarning, RolloutError
from rlhf.rollout import FinishReason, Rollout
from tests.models import EOS, FAMILIES, PAD, VOCABULARY, char_tokenizer, tiny_model

NEVER = -1  # an end token that no model samples


def _prompts(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]


def _engine(model: Any, tokenizer: Any = None, **options: Any) -> TransformersEngine:
    return TransformersEngine(model, tokenizer, progress=False, **options)


def _plain_logprobs(model: Any, rollout: Rollout, row: int) -> torch.Tensor:
    """[T_i] from one unpadded forward pass of the whole sequence."""
    prompt, response = rollout.prompt_ids[row], rollout.response_ids[row, : rollout.lengths[row]]
    with torch.no_grad():
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].float()
    scale = float(rollout.temperature[row]) or 1.0
    return (logits / scale).log_softmax(-1).gather(-1, response[:, None]).squeeze(-1)


def _assert_exact(model: Any, rollout: Rollout, tolerance: float = 1e-5) -> None:
    for row in range(len(rollout)):
        got = rollout.logprobs[row, : rollout.lengths[row]]
        torch.testing.assert_close(got, _plain_logprobs(model, rollout, row), atol=tolerance, rtol=0)


def _ids(rollout: Rollout) -> list[list[int]]:
    return [rollout.response_ids[row, :length].tolist() for row, length in enumerate(rollout.lengths.tolist())]


class _WithHeadStart(torch.nn.Module):
    """Pushes the logit of some tokens up or down by a bias on the head."""

    def __init__(self, head: torch.nn.Linear, pushes: dict[int, float]) -> None:
        super().__init__()
        self.head = head
        self.weight = head.weight
        self.register_buffer("push", torch.zeros(head.out_features).index_put((torch.tensor([*pushes]),), torch.tensor([*pushes.values()])))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden) + self.push


def _pushed(pushes: dict[int, float], **options: Any) -> Any:
    model = tiny_model("qwen2", **options)
    model.set_output_embeddings(_WithHeadStart(model.get_output_embeddings(), pushes))
    return model


# ---------------------------------------------------------------- exactness


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_a_plain_unpadded_forward(family: str, attention: str) -> None:
    """Ragged prompts, groups of three, a temperature, windows of 8 tokens: to 1e-5 in float32, which is rounding."""
    model = tiny_model(family, attn_implementation=attention)
    rollout = _engine(model).generate(
        _prompts(3, 17, 1, 9), SamplingParams(n=3, max_new_tokens=24, temperature=0.8, stop_token_ids=[7, 8], seed=1)
    )
    assert rollout.lengths.max() > 16  # beyond the window
    assert len(set(rollout.lengths.tolist())) > 1
    _assert_exact(model, rollout)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_generate(family: str) -> None:
    model = tiny_model(family)
    prompts = _prompts(5, 12, 2)
    rollout = _engine(model).generate(prompts, SamplingParams(max_new_tokens=20, temperature=0))
    for row, prompt in enumerate(prompts):
        with torch.no_grad():
            expected = model.generate(
                prompt[None], attention_mask=torch.ones(1, len(prompt)), max_new_tokens=20, do_sample=False, pad_token_id=PAD
            )
        assert _ids(rollout)[row] == expected[0, len(prompt) :].tolist()
    assert rollout.temperature.tolist() == [0.0] * 3
    _assert_exact(model, rollout)  # greedy scores as temperature 1


def test_a_single_head_group_and_an_odd_head_size_are_exact() -> None:
    for overrides in ({"num_key_value_heads": 1}, {"num_key_value_heads": 4}, {"head_dim": 12}):
        model = tiny_model("llama", **overrides)
        _assert_exact(model, _engine(model).generate(_prompts(4, 7), SamplingParams(n=2, max_new_tokens=10, seed=0)))


def test_a_model_whose_head_cannot_be_reproduced_is_exact_all_the_same() -> None:
    model = tiny_model("gpt2")
    plain = model.forward
    model.forward = lambda *args, **kwargs: (lambda out: out.__setitem__("logits", out.logits.sin() * 3) or out)(plain(*args, **kwargs))
    with pytest.warns(RLHFWarning, match="not a scaled or soft-capped product"):
        engine = _engine(model)
    _assert_exact(model, engine.generate(_prompts(4, 7), SamplingParams(n=2, max_new_tokens=6, seed=0)))


def test_bf16_weights_follow_their_own_forward() -> None:
    """Tokens agree wherever the plain forward's two best logits are further apart than bf16 rounding; log-probabilities are finite."""
    model = tiny_model("qwen2").bfloat16()
    rollout = _engine(model).generate(_prompts(6, 11, 3), SamplingParams(max_new_tokens=24, temperature=0))
    assert rollout.logprobs.dtype == torch.float32
    clear = 0
    for row in range(3):
        prompt, response = rollout.prompt_ids[row], rollout.response_ids[row, : rollout.lengths[row]]
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].float()
        best = logits.topk(2).values
        sure = best[:, 0] - best[:, 1] > 0.1
        clear += int(sure.sum())
        assert response[sure].tolist() == logits.argmax(-1)[sure].tolist()
    assert clear > 20
    _assert_exact(model, rollout, tolerance=0.1)


# ---------------------------------------------------------------- seeds


def test_the_same_engine_seed_repeats_a_whole_run_bitwise() -> None:
    model, sampling = tiny_model("qwen2"), SamplingParams(n=2, max_new_tokens=12)
    runs = []
    for seed in (7, 7, 8):
        engine = _engine(model, seed=seed)
        runs.append([engine.generate(_prompts(4, 6), sampling) for _ in range(2)])
    for first, second in zip(runs[0], runs[1], strict=True):
        assert torch.equal(first.response_ids, second.response_ids)
        assert torch.equal(first.logprobs, second.logprobs)
    assert _ids(runs[0][0]) != _ids(runs[0][1])  # calls of one engine differ
    assert _ids(runs[0][0]) != _ids(runs[2][0])


def test_a_fixed_seed_repeats_a_call_and_its_group_members_still_differ() -> None:
    engine = _engine(tiny_model("llama"))
    sampling = SamplingParams(n=8, max_new_tokens=16, seed=0)
    first, second = engine.generate(_prompts(5), sampling), engine.generate(_prompts(5), sampling)
    assert _ids(first) == _ids(second)
    assert len({tuple(ids) for ids in _ids(first)}) == 8
    twins = engine.generate(_prompts(5) * 2, sampling)
    assert len({tuple(ids) for ids in _ids(twins)}) == 16  # the same prompt twice
    assert _ids(twins)[:8] == _ids(first)


# ---------------------------------------------------------------- options


def test_filters_bound_the_samples_and_leave_logprobs_over_the_whole_vocabulary() -> None:
    model = tiny_model("qwen2", eos=NEVER)
    engine = _engine(model)
    for fields in ({"top_k": 3}, {"top_p": 0.2}, {"min_p": 0.5}):
        rollout = engine.generate(_prompts(4, 9), SamplingParams(n=4, max_new_tokens=12, temperature=1.3, seed=2, **fields))
        assert rollout.filtered.all()
        _assert_exact(model, rollout)
        for row in range(len(rollout)):
            prompt, response = rollout.prompt_ids[row], rollout.response_ids[row]
            with torch.no_grad():
                p = (model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / 1.3).softmax(-1)
            taken = p.gather(-1, response[:, None])
            above = torch.where(p > taken + 1e-6, p, 0.0)
            if "top_k" in fields:
                assert (above > 0).sum(-1).max() <= 2
            elif "top_p" in fields:
                assert above.sum(-1).max() < 0.2 + 1e-5
            else:
                assert (taken / p.amax(-1, keepdim=True)).min() > 0.5 - 1e-5
    assert not engine.generate(_prompts(4), SamplingParams(max_new_tokens=2)).filtered.any()
    assert not engine.generate(_prompts(4), SamplingParams(max_new_tokens=2, temperature=0, top_k=3)).filtered.any()


def test_calls_with_different_options_share_a_batch_without_touching_each_other() -> None:
    model = tiny_model("qwen3")
    options = [
        SamplingParams(n=2, max_new_tokens=9, seed=1),
        SamplingParams(max_new_tokens=14, temperature=0),
        SamplingParams(n=3, max_new_tokens=6, temperature=0.5, top_p=0.8, seed=2),
        SamplingParams(n=2, max_new_tokens=11, temperature=1.7, top_k=5, min_new_tokens=4, seed=3),
        SamplingParams(max_new_tokens=5, min_p=0.2, stop_token_ids=range(3, 30), seed=4),
    ]
    prompts = _prompts(3, 8, 5, 13, 2)
    engine = _engine(model)

    async def together() -> list[Rollout]:
        return await asyncio.gather(*(engine.agenerate(prompt, sampling) for prompt, sampling in zip(prompts, options, strict=True)))

    alone = [_engine(model).generate(prompt, sampling) for prompt, sampling in zip(prompts, options, strict=True)]
    for mixed, single in zip(asyncio.run(together()), alone, strict=True):
        assert _ids(mixed) == _ids(single)
        assert mixed.finish_reasons == single.finish_reasons
        torch.testing.assert_close(mixed.logprobs, single.logprobs, atol=1e-5, rtol=0)
        _assert_exact(model, mixed)


# ---------------------------------------------------------------- the end of a response


def test_every_end_token_of_the_model_stops_and_stays() -> None:
    """B021: three end ids in the generation config and one more in the tokenizer; each sampled one ends its row and is kept."""
    model = _pushed({20: 2.0, 21: 2.0, 22: 2.0, EOS: 2.0}, eos=[20, 21, 22])
    rollout = _engine(model, char_tokenizer()).generate(_prompts(4), SamplingParams(n=40, max_new_tokens=30, seed=0))
    stopped = [ids for ids, reason in zip(_ids(rollout), rollout.finish_reasons, strict=True) if reason is FinishReason.STOP]
    assert {ids[-1] for ids in stopped} == {20, 21, 22, EOS}
    assert not any({20, 21, 22, EOS} & set(ids[:-1]) for ids in _ids(rollout))
    assert rollout.truncated.tolist() == [reason is FinishReason.LENGTH for reason in rollout.finish_reasons]


def test_truncation_is_told_by_the_finish_reason_and_not_by_the_width() -> None:
    """B023: the widest row of a batch may have stopped; an end token in the very last place is a STOP."""
    model = tiny_model("qwen2", eos=NEVER)
    free = _engine(model).generate(_prompts(4), SamplingParams(max_new_tokens=6, seed=0))
    assert (free.finish_reasons, free.lengths.tolist()) == ([FinishReason.LENGTH], [6])
    last = int(free.response_ids[0, 5])
    assert last not in _ids(free)[0][:5]
    stopped = _engine(model).generate(_prompts(4), SamplingParams(max_new_tokens=6, seed=0, stop_token_ids=[last]))
    assert (stopped.finish_reasons, stopped.lengths.tolist()) == ([FinishReason.STOP], [6])
    assert not stopped.truncated.any()


def test_a_response_of_nothing_but_the_end_token_is_a_response() -> None:
    """B058."""
    model = _pushed({EOS: 50.0})
    rollout = _engine(model, char_tokenizer()).generate(["12", "3"], SamplingParams(n=2, max_new_tokens=5))
    assert _ids(rollout) == [[EOS]] * 4
    assert rollout.texts == [""] * 4
    assert rollout.raw_texts == ["<eos>"] * 4
    assert rollout.finish_reasons == [FinishReason.STOP] * 4
    assert rollout.logprobs.shape == (4, 1)
    _assert_exact(model, rollout)


def test_pad_may_equal_the_end_token() -> None:
    tokenizer = char_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    model = tiny_model("qwen2", pad_token_id=EOS)
    rollout = _engine(model, tokenizer).generate(["12", "345678"], SamplingParams(n=8, max_new_tokens=60, seed=0))
    stopped = [ids for ids, reason in zip(_ids(rollout), rollout.finish_reasons, strict=True) if reason is FinishReason.STOP]
    assert stopped
    assert all(ids[-1] == EOS and EOS not in ids[:-1] for ids in stopped)
    _assert_exact(model, rollout)


def test_min_new_tokens_forbids_end_tokens_until_then_without_counting_as_a_filter() -> None:
    model = _pushed({EOS: 3.0, 20: 3.0}, eos=[EOS, 20])
    rollout = _engine(model).generate(_prompts(4, 2), SamplingParams(n=6, max_new_tokens=20, min_new_tokens=7, stop_token_ids=[21], seed=0))
    assert rollout.lengths.min() == 8  # pushed hard enough that some row ends as soon as it may
    assert all(not {EOS, 20, 21} & set(ids[:7]) for ids in _ids(rollout))
    assert not rollout.filtered.any()
    _assert_exact(model, rollout)  # over the whole vocabulary, the forbidden tokens included
    greedy = _engine(model).generate(_prompts(4), SamplingParams(max_new_tokens=20, min_new_tokens=7, temperature=0))
    assert not {EOS, 20} & set(_ids(greedy)[0][:7])


@pytest.mark.parametrize("max_rows", [1, 4])
def test_rows_leave_the_ban_on_end_tokens_one_by_one(max_rows: int) -> None:
    """Rows that joined at different times are under min_new_tokens for different steps of the batch."""
    model = _pushed({EOS: 4.0})
    sampling = SamplingParams(n=5, max_new_tokens=12, min_new_tokens=3, seed=0)
    rollout = _engine(model, max_rows=max_rows).generate(_prompts(4, 2, 3), sampling)
    assert all(EOS not in ids[:3] for ids in _ids(rollout))
    assert (rollout.lengths == 4).any()


def _echo(text: str, tokenizer: Any) -> Any:
    """A model that says `text` over and over: each position's logits are forced through the head."""
    ids = tokenizer(text, add_special_tokens=False).input_ids
    model = tiny_model("gpt2", vocab_size=len(tokenizer), eos=NEVER)
    # learned positions alone decide: token t+1 of the text at position t
    with torch.no_grad():
        model.transformer.wte.weight.zero_()
        model.transformer.wpe.weight.copy_(torch.eye(model.config.n_embd).repeat(256 // model.config.n_embd, 1) * 5)
        for block in model.transformer.h:
            for projection in (block.attn.c_proj, block.mlp.c_proj):
                projection.weight.zero_()
                projection.bias.zero_()
        head = torch.nn.Linear(model.config.n_embd, len(tokenizer), bias=False)
        head.weight.zero_()
        for position in range(model.config.n_embd):
            head.weight[ids[position % len(ids)], position] = 20.0
        model.transformer.ln_f.weight.fill_(1.0)
        model.transformer.ln_f.bias.zero_()
    model.config.tie_word_embeddings = False
    model.set_output_embeddings(head)
    return model


@pytest.mark.parametrize(
    "stop, expected",
    [
        ("world", "hello world"),
        (["xyz", "lo wo"], "hello wo"),
        ("答え", "hello world 答え"),  # each character is three byte tokens
        ("😀", "hello world 答え 😀"),
    ],
)
def test_a_stop_string_ends_the_row_and_stays_in_text_and_ids(bpe: Any, stop: Any, expected: str) -> None:
    model = _echo("hello world 答え 😀 end", bpe)
    rollout = _engine(model, bpe).generate([[5]], SamplingParams(max_new_tokens=30, temperature=0, stop=stop))
    assert rollout.finish_reasons == [FinishReason.STOP]
    # the token that completes the stop string may reach beyond it
    assert rollout.texts[0].startswith(expected)
    shorter = bpe.decode(_ids(rollout)[0][:-1], clean_up_tokenization_spaces=False)
    assert not any(text in shorter for text in ([stop] if isinstance(stop, str) else stop))
    assert rollout.texts[0] == bpe.decode(_ids(rollout)[0], clean_up_tokenization_spaces=False)


def test_a_stop_string_before_min_new_tokens_does_not_end_the_row_then_or_later(bpe: Any) -> None:
    model = _echo("ab ab cd ", bpe)
    free = _engine(model, bpe).generate([[5]], SamplingParams(max_new_tokens=30, temperature=0))
    sampling = SamplingParams(max_new_tokens=30, temperature=0, stop="ab", min_new_tokens=6)
    rollout = _engine(model, bpe).generate([[5]], sampling)
    text = rollout.texts[0]
    assert rollout.finish_reasons == [FinishReason.STOP]
    assert rollout.lengths[0] >= 6
    assert text.endswith("ab")
    assert text.count("ab") > 1
    assert free.texts[0].startswith(text)


def test_only_rows_with_their_own_stop_strings_are_stopped_by_them() -> None:
    model, tokenizer = tiny_model("qwen2", eos=NEVER), char_tokenizer()
    engine = _engine(model, tokenizer)
    sampling = SamplingParams(n=16, max_new_tokens=40, seed=5)
    free = engine.generate(["12"], sampling)
    stopped = engine.generate(["12"], sampling.replace(stop=["q", "b1", "zz"]))
    for whole, cut, reason in zip(free.raw_texts, stopped.raw_texts, stopped.finish_reasons, strict=True):
        ends = [whole.find(text) + len(text) for text in ("q", "b1", "zz") if text in whole]
        end = min(ends) if ends and reason is FinishReason.STOP else None
        assert cut == whole[:end]
        assert (reason is FinishReason.STOP) == (bool(ends) or whole.endswith("<eos>"))


def test_responses_are_cut_where_the_models_positions_end() -> None:
    """B059: one warning, finish reason LENGTH; and every position that exists is used."""
    model = tiny_model("gpt2", eos=NEVER)
    engine = _engine(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rollout = engine.generate(_prompts(250, 255, 200), SamplingParams(n=2, max_new_tokens=50, seed=0))
    messages = [str(entry.message) for entry in caught if issubclass(entry.category, RLHFWarning)]
    assert len(messages) == 1
    assert "2 of 3 prompts leave room for fewer than max_new_tokens=50" in messages[0]
    assert "256 positions" in messages[0]
    assert rollout.lengths.tolist() == [6, 6, 1, 1, 50, 50]
    assert rollout.truncated.all()
    _assert_exact(model, rollout)


# ---------------------------------------------------------------- the result


def test_a_rollout_knows_its_rows_groups_and_texts() -> None:
    tokenizer = char_tokenizer()
    prompts = rlhf.PromptDataset([{"prompt": "1+2=", "ground_truth": "3"}, {"prompt": "4", "ground_truth": "4"}], tokenizer)
    rollout = _engine(tiny_model("qwen2"), tokenizer).generate(list(prompts), SamplingParams(n=3, max_new_tokens=7, seed=0))
    assert rollout.group.tolist() == [0, 0, 0, 1, 1, 1]
    assert [row["ground_truth"] for row in rollout.rows] == ["3"] * 3 + ["4"] * 3
    assert [tokenizer.decode(ids) for ids in rollout.prompt_ids] == ["1+2="] * 3 + ["4"] * 3
    assert rollout.raw_texts == [tokenizer.decode(ids, skip_special_tokens=False) for ids in _ids(rollout)]
    assert rollout.response_mask.equal(rollout.padding_mask)
    assert rollout.weight_version.tolist() == [0] * 6


def test_results_are_plain_cpu_tensors_that_autograd_takes() -> None:
    rollout = _engine(tiny_model("qwen2")).generate(_prompts(4), SamplingParams(max_new_tokens=5))
    for tensor in (rollout.response_ids, rollout.logprobs, rollout.lengths, rollout.response_mask):
        assert tensor.device.type == "cpu"
        assert not tensor.is_inference()
        assert not tensor.requires_grad
    scale = torch.ones((), requires_grad=True)
    (scale * rollout.logprobs).sum().backward()
    assert scale.grad is not None


# ---------------------------------------------------------------- weights


def _step(actor: Any, rollout: Rollout) -> None:
    """One optimiser step on whatever the rollout holds."""
    rewards = rlhf.Rewards(torch.arange(len(rollout), dtype=torch.float32), [rlhf.Status.OK] * len(rollout))
    experience = rlhf.make_experience(rollout, rewards, actor=actor).with_advantages(rlhf.GRPO())
    actor.update(experience)


def test_an_actors_weights_are_shared_and_each_update_reaches_the_next_rollout() -> None:
    actor = rlhf.Actor(tiny_model("qwen2"), char_tokenizer(), lr=1e-2)
    engine = _engine(actor)
    assert {p.data_ptr() for p in engine.model.parameters()} == {p.data_ptr() for p in actor.model.parameters()}
    sampling = SamplingParams(n=4, max_new_tokens=8, seed=0)
    first = engine.generate(["12", "34"], sampling, weights=actor)
    assert first.weight_version.tolist() == [0] * 8
    _step(actor, first)
    assert actor.weight_version == 1
    second = engine.generate(["12", "34"], sampling, weights=actor)
    assert second.weight_version.tolist() == [1] * 8
    assert second.logprobs[0, 0] != first.logprobs[0, 0]
    _assert_exact(actor.model, second)
    assert "shared with the actor, version 1" in repr(engine)


def test_a_model_of_its_own_takes_the_actors_weights_when_it_is_behind() -> None:
    actor = rlhf.Actor(tiny_model("llama"), char_tokenizer(), lr=1e-2)
    engine = _engine(copy.deepcopy(actor.model), char_tokenizer())
    sampling = SamplingParams(n=4, max_new_tokens=8, seed=0)
    first = engine.generate(["12"], sampling, weights=actor)
    _step(actor, first)
    stale = engine.generate(["12"], sampling)
    assert stale.weight_version.tolist() == [0] * 4
    assert torch.equal(stale.logprobs, first.logprobs)
    fresh = engine.generate(["12"], sampling, weights=actor)
    assert fresh.weight_version.tolist() == [1] * 4
    _assert_exact(actor.model, fresh)
    assert engine.sync(actor) is False
    assert {p.data_ptr() for p in engine.model.parameters()}.isdisjoint({p.data_ptr() for p in actor.model.parameters()})


def test_an_engine_made_of_the_actors_model_reports_the_actors_version() -> None:
    actor = rlhf.Actor(tiny_model("qwen2"), char_tokenizer(), lr=1e-2)
    engine = _engine(actor.model, actor.tokenizer)
    _step(actor, engine.generate(["12"], SamplingParams(n=4, max_new_tokens=4), weights=actor))
    assert engine.generate(["12"], SamplingParams(max_new_tokens=4), weights=actor).weight_version.tolist() == [1]


def test_weights_that_do_not_fit_are_refused_by_name() -> None:
    engine = _engine(tiny_model("qwen2"))
    before = copy.deepcopy(engine.model.state_dict())
    with pytest.raises(ModelError, match=r"names or shapes differ, first 'model\.layers\.0\.mlp\.down_proj\.weight'"):
        engine.update_weights(tiny_model("qwen2", intermediate_size=48))
    with pytest.raises(ModelError, match=r"names or shapes differ, first 'lm_head\.weight'"):
        engine.update_weights(tiny_model("qwen2", tie_word_embeddings=True))
    assert all(torch.equal(value, before[name]) for name, value in engine.model.state_dict().items())


def test_an_engine_that_shares_an_actors_weights_never_overwrites_them() -> None:
    actor, other = (rlhf.Actor(tiny_model("qwen2", seed=seed), char_tokenizer()) for seed in (0, 1))
    engine = _engine(actor)
    before = copy.deepcopy(actor.model.state_dict())
    other.weight_version = 5
    with pytest.raises(EngineError, match="make a TransformersEngine for each Actor"):
        engine.generate(["1"], SamplingParams(max_new_tokens=1), weights=other)
    assert all(torch.equal(value, before[name]) for name, value in actor.model.state_dict().items())


def test_equal_versions_of_different_models_are_different_weights() -> None:
    first, second = (rlhf.Actor(tiny_model("qwen2", seed=seed), char_tokenizer()) for seed in (0, 1))
    sampling = SamplingParams(n=2, max_new_tokens=4, seed=0)
    with pytest.raises(EngineError, match="make a TransformersEngine for each Actor"):
        _engine(first).generate(["1"], sampling, weights=second)
    engine = _engine(tiny_model("qwen2", seed=2), char_tokenizer())
    for actor in (first, second):
        _assert_exact(actor.model, engine.generate(["1"], sampling, weights=actor))
        assert engine.sync(actor) is False


@pytest.mark.parametrize("sampling", [None, {"n": 2}])
def test_options_that_are_no_sampling_params_are_named(sampling: Any) -> None:
    for engine in (_engine(tiny_model("qwen2"), char_tokenizer()), rlhf.FakeEngine()):
        with pytest.raises(ConfigError, match=f"sampling must be SamplingParams, got {type(sampling).__name__}"):
            engine.generate("1", sampling)


def test_weights_that_change_under_a_running_call_are_an_error_and_not_a_mixture() -> None:
    actor = rlhf.Actor(tiny_model("qwen2", eos=NEVER), char_tokenizer())
    engine = _engine(actor)

    def step_ends(*_: Any) -> None:
        actor.weight_version = 1

    handle = actor.model.model.register_forward_hook(step_ends)
    with pytest.raises(EngineError, match="went from version 0 to 1 while these responses were generated"):
        engine.generate(["1"], SamplingParams(max_new_tokens=3))
    handle.remove()
    assert engine.generate(["1"], SamplingParams(max_new_tokens=3)).weight_version.tolist() == [1]


@pytest.mark.parametrize("training", [True, False])
def test_generating_leaves_mode_checkpointing_and_gradients_as_they_were(training: bool) -> None:
    model = tiny_model("qwen2", eos=NEVER)
    actor = rlhf.Actor(model, char_tokenizer(), gradient_checkpointing=True)
    model.train(training)
    model.model.embed_tokens.weight.requires_grad_(False)
    modes = [module.training for module in model.modules()]
    checkpointing = model.is_gradient_checkpointing
    trained = [p.requires_grad for p in model.parameters()]
    engine = _engine(actor)
    for _ in range(5):  # once is not enough to catch a mode restored after the caller goes on
        rollout = engine.generate(["12", "3"], SamplingParams(n=2, max_new_tokens=4))
        assert [module.training for module in model.modules()] == modes
    assert model.is_gradient_checkpointing == checkpointing
    assert [p.requires_grad for p in model.parameters()] == trained
    assert all(p.grad is None for p in model.parameters())
    _assert_exact(model, rollout)


# ---------------------------------------------------------------- bad input


def test_a_prompt_as_long_as_the_positions_is_refused_by_number() -> None:
    with pytest.raises(RolloutError, match=r"prompt 1 has 256 tokens and the model's positions end at 256"):
        _engine(tiny_model("gpt2")).generate(_prompts(3, 256), SamplingParams(max_new_tokens=1))


def test_a_row_over_the_token_budget_is_refused_with_advice() -> None:
    with pytest.raises(EngineError, match=r"prompt 0: prompt and max_new_tokens take 37 tokens of keys and values, max_batch_tokens is 36"):
        _engine(tiny_model("qwen2"), max_batch_tokens=36).generate(_prompts(7), SamplingParams(max_new_tokens=30))
    full = _engine(tiny_model("qwen2", eos=NEVER), max_batch_tokens=37).generate(_prompts(7, 3), SamplingParams(n=2, max_new_tokens=30))
    assert full.lengths.tolist() == [30] * 4


@pytest.mark.parametrize(
    "prompts, sampling, message",
    [
        ([], {}, "at least one prompt, got none"),
        ([[5], []], {}, "prompt 1 must have at least one token"),
        ("12", {}, "prompt 0 is text, and this engine has no tokenizer"),
        ([[5]], {"stop": "x"}, "stop strings need a tokenizer"),
    ],
)
def test_bad_calls_are_refused(prompts: Any, sampling: dict[str, Any], message: str) -> None:
    engine = _engine(tiny_model("qwen2"))
    with pytest.raises(RolloutError, match=message):
        engine.generate(prompts, SamplingParams(**sampling))
    assert len(engine.generate([[5]], SamplingParams(max_new_tokens=1))) == 1


def test_a_token_outside_the_vocabulary_is_refused_by_prompt() -> None:
    with pytest.raises(RolloutError, match=rf"prompt 1 .* {VOCABULARY}"):
        _engine(tiny_model("qwen2")).generate([[5], [5, VOCABULARY]], SamplingParams(max_new_tokens=1))


def test_models_without_an_attention_cache_are_refused() -> None:
    import transformers

    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=32, hidden_size=8, num_hidden_layers=1, state_size=4))
    with pytest.raises(ModelError, match="needs attention in every layer"):
        _engine(mamba)
    model = tiny_model("qwen2")
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ModelError, match=r"needs attention in every layer; this model has \['linear_attention'\]"):
        _engine(model)
    with pytest.raises(ModelError, match="got dict"):
        _engine({})


def test_sizes_below_one_are_refused() -> None:
    for name in ("max_rows", "max_batch_tokens", "max_prefill_tokens"):
        with pytest.raises(ConfigError, match=f"{name} must be at least 1; got 0"):
            _engine(tiny_model("qwen2"), **{name: 0})


def test_a_closed_engine_refuses_and_may_be_closed_twice() -> None:
    with _engine(tiny_model("qwen2")) as engine:
        engine.generate([[5]], SamplingParams(max_new_tokens=1))
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate([[5]], SamplingParams(max_new_tokens=1))
    with pytest.raises(EngineError, match="closed"):
        asyncio.run(engine.agenerate([[5]], SamplingParams(max_new_tokens=1)))


def test_broken_weights_are_an_error_that_says_so() -> None:
    model = tiny_model("qwen2")
    engine = _engine(model)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(EngineError, match="logits must be finite"):
        engine.generate([[5]], SamplingParams(max_new_tokens=3))
