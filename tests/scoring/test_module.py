"""The scoring module says what the model says of each row alone, in every layout, and never holds the logits of a batch."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import rlhf.scoring.layout
import rlhf.scoring.module
from rlhf import Actor, Experience, ModelError, RLHFWarning, Rollout, RolloutError, SupervisedLoss
from rlhf.models import LogitHead, ScalarHead
from rlhf.scoring import LAYOUTS, ScoringModule, ValueModule, collate, packed_batches, plan_micro_batches, token_statistics
from tests.batches import gradients, plain_statistics, ragged_rollout, with_exact_norms
from tests.models import FAMILIES, tiny_model

# An eager softmax runs in float32 whatever the model: what float64 leaves there is float32's rounding.
TOLERANCE = {"float32": 1e-5, "float64": 1e-10, "eager float64": 2e-6}


@pytest.mark.parametrize(
    "family, rollout, message",
    [
        ("gpt2", Rollout.build([[5] * 250], [[6] * 7]), "fit the model's 256 positions, got 257 tokens"),
        ("qwen2", Rollout.build([[5]], [[600]]), "response_ids must be below the model's 64 embeddings, got 600"),
        ("qwen2", Rollout.build([[500]], [[6]]), "prompt_ids must be below the model's 64 embeddings, got 500"),
    ],
)
def test_what_the_model_has_no_embedding_for_is_named_before_it_ends_the_process(family, rollout, message):
    actor = Actor(tiny_model(family))
    with pytest.raises(RolloutError, match=message):
        actor.logprobs(rollout)
    with pytest.raises(RolloutError, match=message):
        actor.update(Experience(rollout=rollout), SupervisedLoss())


def test_padding_may_hold_any_id_and_rotary_positions_have_no_end():
    rollout = Rollout.build([[5] * 250, [5]], [[6] * 7, [7]])
    rollout.response_ids[1, 1:] = 999
    assert Actor(tiny_model("qwen2")).logprobs(rollout).isfinite().all()


def scored(module, rollout, *, budget=64):
    """log-probabilities and entropies [B, T] through the module's own layout."""
    results = [torch.zeros(rollout.response_ids.shape, dtype=module.dtype) for _ in range(2)]
    for batch in packed_batches(rollout, module, budget):
        outputs = module(batch.input_ids, batch.position_ids, batch.mask, batch.predicting, batch.targets, batch.temperature)
        results = [result.index_put((batch.rows, batch.columns), value) for result, value in zip(results, outputs, strict=True)]
    return results


def weighted_gradients(model, logprobs, entropy):
    """Gradients of one fixed weighted sum of log-probabilities and entropies."""
    weights = torch.linspace(-1, 1, logprobs.numel(), dtype=logprobs.dtype).view_as(logprobs)
    model.zero_grad()
    (weights * logprobs + 0.5 * weights.flip(0) * entropy).sum().backward()
    return gradients(model)


@pytest.fixture
def rollout():
    """Longer than the sliding windows of 8, at several temperatures; 0 scores as 1."""
    return ragged_rollout(seed=1, prompts=3, n=3, longest=14, temperature=[1.0, 0.7, 2.0, 0.0, 1.0, 0.3, 1.0, 1.5, 1.0])


# ------------------------------------------------------------------ the definition


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_and_entropies_are_the_models_own_in_every_layout(family, attention, rollout):
    model = tiny_model(family)
    model.set_attn_implementation(attention)
    for dtype in ("float32", "float64"):
        if dtype == "float64":
            with_exact_norms(model.double())
        expected = plain_statistics(model, rollout)
        wanted = weighted_gradients(model, *expected)
        tolerance = TOLERANCE[f"{'eager ' if attention == 'eager' and dtype == 'float64' else ''}{dtype}"]
        module = ScoringModule(model)
        assert module.layout == "shared"
        for layout in LAYOUTS:
            module.layout = layout
            for budget in (40, 10_000):
                got = scored(module, rollout, budget=budget)
                for name, value, want in zip(("logprobs", "entropy"), got, expected, strict=True):
                    error = float((value - want).detach().abs().max())
                    assert error <= tolerance, (name, layout, budget, error)
            got = weighted_gradients(model, *got)
            scale = max(float(value.abs().max()) for value in wanted.values())
            for name, want in wanted.items():
                error = float((got[name] - want).abs().max())
                assert error <= tolerance * scale, (name, layout, error, scale)


@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_the_heads_product_with_each_rows_own_hidden_states(family, rollout):
    model = tiny_model(family).double()
    head = ScalarHead(32, dtype=torch.float64)
    nn.init.normal_(head.linear.weight, generator=torch.Generator().manual_seed(0))
    module = ValueModule(model, head)
    empty = Rollout.build([rollout.prompt_ids[0]], [[]], temperature=1.0)
    rollout = Rollout.concat([rollout, empty])
    for layout in LAYOUTS:
        module.layout = layout
        values = torch.zeros(rollout.response_ids.shape, dtype=torch.float64)
        last = torch.full((len(rollout),), math.nan, dtype=torch.float64)
        for batch in packed_batches(rollout, module, 60, last_token=True):
            before, after = module(batch.input_ids, batch.position_ids, batch.mask, batch.predicting, batch.last)
            values[batch.rows, batch.columns], last[batch.last_rows] = before.detach(), after.detach()
        for i in range(len(rollout)):
            ids = torch.cat([rollout.prompt_ids[i], rollout.response_ids[i, : rollout.lengths[i]]])
            hidden = rlhf.models.backbone_of(model)(input_ids=ids[None], use_cache=False).last_hidden_state[0]
            states = head(hidden).detach()[len(rollout.prompt_ids[i]) - 1 :]
            want = torch.where(rollout.response_mask[i, : len(states) - 1], states[:-1], 0)
            torch.testing.assert_close(values[i, : len(want)], want, rtol=0, atol=1e-10)
            assert not values[i, len(want) :].any()
            assert float(last[i]) == pytest.approx(float(states[-1]), abs=1e-10)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_in_the_padding_change_nothing(layout, rollout):
    module = ScoringModule(tiny_model("qwen2"))
    module.layout = layout
    clean = scored(module, rollout)
    rollout.response_ids[~rollout.padding_mask] = 17
    for before, after in zip(clean, scored(module, rollout), strict=True):
        assert torch.equal(before, after)


def test_tool_output_is_read_but_not_scored():
    module = ScoringModule(tiny_model("qwen2"))
    rollout = Rollout.build([[5, 6]], [[7, 8, 9]], response_masks=[[True, False, True]])
    logprobs, _ = scored(module, rollout)
    assert logprobs[0, 1] == 0
    rollout.response_ids[0, 1] = 20
    changed, _ = scored(module, rollout)
    assert changed[0, 0] == logprobs[0, 0]
    assert changed[0, 2] != logprobs[0, 2]


@pytest.mark.parametrize("responses", [[], [[]], [[1]], [[], [4], [4, 1]]])
def test_empty_and_one_token_responses_have_a_defined_result(responses):
    model = tiny_model("llama")
    module = ScoringModule(model)
    rollout = Rollout.build([[5, 6]] * len(responses), responses)
    logprobs, entropy = scored(module, rollout)
    expected = plain_statistics(model, rollout) if responses else (logprobs, entropy)
    assert logprobs.shape == entropy.shape == rollout.response_ids.shape
    torch.testing.assert_close(logprobs, expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, expected[1], rtol=0, atol=1e-5)


def test_a_temperature_of_zero_scores_as_one():
    module = ScoringModule(tiny_model("qwen2"))
    one, zero = (scored(module, Rollout.build([[5]], [[6, 7, 8]], temperature=t)) for t in (1.0, 0.0))
    assert torch.equal(one[0], zero[0])
    assert torch.equal(one[1], zero[1])


def test_a_temperature_near_zero_underflows_nothing():
    module = ScoringModule(tiny_model("qwen2"))
    logprobs, entropy = scored(module, Rollout.build([[5]], [[6, 7, 8]], temperature=0.01))
    assert logprobs.isfinite().all()
    assert entropy.isfinite().all()
    assert bool((entropy >= -1e-4).all())


# ------------------------------------------------------------------ planted faults


@pytest.mark.parametrize(
    "fault",
    [
        lambda mask: mask | torch.ones_like(mask).tril() & (mask.sum(1, keepdim=True) > 0),  # responses see each other
        lambda mask: mask.roll(1, 2) | torch.eye(mask.shape[1], dtype=torch.bool),  # off by one
    ],
    ids=["leak", "off by one"],
)
def test_a_planted_fault_in_the_mask_is_seen_and_switches_to_separate_rows(fault, rollout, monkeypatch):
    right = rlhf.scoring.layout._shared_prompt_mask
    model = tiny_model("qwen2")
    module = ScoringModule(model)
    expected, _ = plain_statistics(model, rollout)
    monkeypatch.setattr(rlhf.scoring.layout, "_shared_prompt_mask", lambda segment: fault(right(segment)))
    assert float((scored(module, rollout)[0] - expected).detach().abs().max()) > 1e-3
    with pytest.warns(RLHFWarning, match="does not take masks that let responses share a prompt"):
        module = ScoringModule(model)
    assert module.layout == "padded"
    torch.testing.assert_close(scored(module, rollout)[0], expected, rtol=0, atol=1e-5)


def test_a_family_that_takes_no_masks_is_scored_row_by_row_with_one_warning(rollout, monkeypatch):
    def refuse(model, allowed, distance):
        raise ValueError("no 4-d masks here")

    monkeypatch.setattr(rlhf.scoring.module, "attention_masks", refuse)
    model = tiny_model("qwen2")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = ScoringModule(model)
    assert [warning.category for warning in caught] == [RLHFWarning]
    assert module.layout == "padded"
    torch.testing.assert_close(scored(module, rollout)[0], plain_statistics(model, rollout)[0], rtol=0, atol=1e-5)


def test_layers_that_no_mask_of_ours_expresses_share_no_prompts():
    masks = torch.ones(1, 4, 4, dtype=torch.bool).tril()
    for kinds, family in ((["full_attention", "chunked_attention"], "qwen2"), (["full_attention", "sliding_attention"], "mistral")):
        model = tiny_model(family)
        model.config.layer_types = kinds
        with pytest.raises(ModelError, match="takes no mask of its own for each of its kinds of layers"):  # settle_layout falls back
            rlhf.models.attention_masks(model, masks, masks.long())


def test_logits_that_the_head_does_not_give_are_computed_whole_with_one_warning(rollout):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        model = tiny_model("qwen2").to(dtype)
        plain, bonus = model.forward, torch.linspace(-1, 1, model.config.vocab_size, dtype=dtype)

        def forward(*args, plain=plain, bonus=bonus, **kwargs):
            output = plain(*args, **kwargs)
            output.logits = output.logits + bonus
            return output

        model.forward = forward
        with pytest.warns(RLHFWarning, match="whole \\[tokens, V\\] logits are computed") as caught:
            module = ScoringModule(model)
        assert len(caught) == 1
        assert module.head is None
        expected = plain_statistics(model, rollout)
        for got, want in zip(scored(module, rollout), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


# ------------------------------------------------------------------ token statistics, by hand


def of_logits(logits, targets, temperature=1.0, **kwargs):
    """token_statistics of logits [M, V] as they stand: hidden states under a head that is the identity."""
    head = nn.Linear(logits.shape[1], logits.shape[1], bias=False, dtype=logits.dtype)
    nn.init.eye_(head.weight)
    temperature = torch.full((len(logits),), temperature) if isinstance(temperature, float) else torch.tensor(temperature)
    return token_statistics(LogitHead(head), logits, torch.tensor(targets), temperature, **kwargs)


def test_the_temperature_divides_logits_not_log_probabilities():
    logits = torch.tensor([[2.0, 1.0, 0.0]]).repeat(3, 1)
    # divided afterwards, the first would read −0.6793, −2.3460, −4.0127
    for temperature, expected in ((0.6, [-0.2025731, -1.8692398, -3.5359064]), (2.0, [-0.6802697, -1.1802697, -1.6802697])):
        logprobs, _ = of_logits(logits, [0, 1, 2], temperature)
        assert logprobs.tolist() == pytest.approx(expected, abs=1e-6)
    logprobs, _ = of_logits(torch.tensor([[0.0, math.log(2)]]), [1], 0.5)
    assert logprobs.item() == pytest.approx(math.log(4 / 5), abs=1e-6)


def test_the_entropy_is_that_of_the_sampling_distribution():
    _, entropy = of_logits(torch.tensor([[2.0, 1.0, 0.0]] * 2), [0, 0], [1.0, 0.5])
    assert entropy.tolist() == pytest.approx([0.8323956, 0.4410574], abs=1e-6)


def test_a_token_is_read_from_the_logits_before_it():
    logits = torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 3.0]])
    rollout = Rollout.build([[0]], [[1, 2]])
    batch = collate(rollout, plan_micro_batches(rollout, budget=10)[0])
    logprobs, _ = of_logits(logits.index_select(0, batch.predicting), batch.targets.tolist())
    assert logprobs.tolist() == pytest.approx([-1.5514447, -2.2395447], abs=1e-5)
    unshifted, _ = of_logits(logits.index_select(0, batch.predicting + 1), batch.targets.tolist())
    assert unshifted.tolist() != pytest.approx([-1.5514447, -2.2395447], abs=1e-2)


def test_the_reference_vectors_of_entropy(shared):
    path = shared / "vectors" / "load_vectors.py"
    module = importlib.util.module_from_spec(spec := importlib.util.spec_from_file_location("load_vectors", path))
    spec.loader.exec_module(module)
    # its reader unpacks a buffer for every name; this one unpacks each buffer once
    module.np = SimpleNamespace(load=lambda archive: dict(np.load(archive)), prod=np.prod)
    vectors = {name: value for name, value in module.load().items() if name.startswith("ent/")}
    for case in range(20):
        logits, labels = (torch.as_tensor(vectors[f"ent/{case:02d}/in/{name}"].copy()) for name in ("logits", "labels"))
        logprobs, entropy = of_logits(logits.flatten(0, 1).double(), labels.flatten().tolist())
        for name, value in (("logp", logprobs), ("entropy", entropy)):
            want = torch.as_tensor(vectors[f"ent/{case:02d}/out/{name}"].copy()).flatten()
            torch.testing.assert_close(value.detach(), want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("chunk", [1, 3, 7, 8, 100])
def test_chunks_change_neither_values_nor_gradients(chunk):
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(5, 11, dtype=torch.float64)
    hidden = torch.randn(8, 5, generator=generator, dtype=torch.float64).requires_grad_()
    targets, temperature = torch.randint(11, (8,), generator=generator), torch.rand(8, generator=generator) + 0.5
    results = []
    for size in (None, chunk):
        hidden.grad = head.weight.grad = None
        logprobs, entropy = token_statistics(LogitHead(head, 0.7, 3.0), hidden, targets, temperature, chunk=size)
        (logprobs * torch.arange(8) + entropy**2).sum().backward()
        results.append((logprobs.detach(), entropy.detach(), hidden.grad, head.weight.grad))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(whole, chunked, rtol=0, atol=1e-12)


@pytest.mark.parametrize("which", ["logprobs", "entropy", "both"])
def test_the_gradients_are_those_of_finite_differences(which):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 6, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(9, 6, generator=generator, dtype=torch.float64).requires_grad_()
    targets, temperature = torch.randint(9, (4,), generator=generator), torch.tensor([1.0, 0.3, 2.0, 1.0])

    class Head(nn.Module):
        def forward(self, hidden):
            return hidden @ weight.T

    def statistics(hidden, weight):
        outputs = token_statistics(LogitHead(Head(), 0.5, 4.0), hidden, targets, temperature, chunk=2)
        return outputs if which == "both" else outputs[which == "entropy"]

    assert torch.autograd.gradcheck(statistics, (hidden, weight), eps=1e-6, atol=1e-7)


def test_a_float32_head_multiplies_bfloat16_states_in_float32():
    head = nn.Linear(64, 50, dtype=torch.bfloat16)
    hidden = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    head.requires_grad_(False)
    targets, one = torch.arange(6), torch.ones(6)
    exact = torch.log_softmax(hidden.double() @ head.weight.double().T + head.bias.double(), -1).gather(-1, targets[:, None])[:, 0]
    short, _ = token_statistics(LogitHead(head), hidden, targets, one)
    long, _ = token_statistics(LogitHead(head, float32=True), hidden, targets, one)
    assert short.dtype == long.dtype == torch.float32
    assert float((long.double() - exact).abs().max()) < 1e-5 < 1e-4 < float((short.double() - exact).abs().max())


# ------------------------------------------------------------------ memory


class Largest(TorchDispatchMode):
    """Remembers the most elements that any tensor made by an operation had."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result


@pytest.mark.parametrize("loss", ["logprobs", "entropy"])
def test_no_tensor_of_tokens_by_vocabulary_exists_forward_or_backward(loss):
    tokens, vocabulary, chunk = 96, 5000, 16
    head, hidden = nn.Linear(8, vocabulary), torch.randn(tokens, 8, requires_grad=True)
    with Largest() as seen:
        outputs = token_statistics(LogitHead(head), hidden, torch.arange(tokens), torch.ones(tokens), chunk=chunk)
        outputs[loss == "entropy"].sum().backward()
    assert hidden.grad.abs().sum() > 0
    assert seen.elements == chunk * vocabulary
    with Largest() as seen:  # the check sees a whole one
        token_statistics(LogitHead(head), hidden, torch.arange(tokens), torch.ones(tokens), chunk=tokens)
    assert seen.elements == tokens * vocabulary


def test_the_chunk_follows_the_vocabulary(monkeypatch):
    sizes = []
    plain = LogitHead.logits
    monkeypatch.setattr(LogitHead, "logits", lambda self, hidden: (sizes.append(len(hidden)), plain(self, hidden))[1])
    monkeypatch.setattr(rlhf.scoring.module, "CHUNK_ELEMENTS", 2000)
    monkeypatch.setattr(rlhf.scoring.module, "MIN_CHUNK_TOKENS", 5)
    with torch.no_grad():
        for vocabulary, expected in ((100, [20, 10]), (1000, [5] * 6)):
            sizes.clear()
            token_statistics(LogitHead(nn.Linear(4, vocabulary)), torch.randn(30, 4), torch.zeros(30, dtype=torch.int64), torch.ones(30))
            assert sizes == expected


MEASURE = """
import resource, torch
from torch import nn
from rlhf.models import LogitHead
from rlhf.scoring import token_statistics
torch.set_num_threads(1)
tokens, vocabulary = 2048, 151_936
generator = torch.Generator().manual_seed(0)
head = nn.Linear(8, vocabulary, bias=False)
hidden = torch.randn(tokens, 8, generator=generator).requires_grad_()
targets = torch.randint(vocabulary, (tokens,), generator=generator)
small = token_statistics(LogitHead(nn.Linear(8, 9)), hidden[:4], torch.arange(4), torch.ones(4), chunk=2)
sum(small).sum().backward()               # what the library itself takes: modules that checkpointing imports
head(hidden[:1]).sum().backward()         # and the gradient of the head
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
logprobs, entropy = token_statistics(LogitHead(head), hidden, targets, torch.ones(tokens))
(logprobs + entropy).sum().backward()
extra = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
with torch.no_grad():
    log_p = torch.log_softmax(head(hidden[:16]).double(), -1)
    error = (log_p.gather(-1, targets[:16, None])[:, 0] - logprobs[:16]).abs().max()
    error = max(error, (-(log_p.exp() * log_p).sum(-1) - entropy[:16]).abs().max())
print(extra / (tokens * vocabulary * 4), float(error))
"""


@pytest.mark.slow
def test_log_probabilities_of_a_large_vocabulary_take_less_than_a_quarter_of_its_logits():
    """2,048 tokens of 151,936 words: the logits alone would take 1.2 GB. ru_maxrss is of this process, so it runs in its own."""
    output = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True).stdout
    share, error = map(float, output.split())
    assert share < 0.25
    assert error < 1e-5
