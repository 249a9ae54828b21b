"""An engine that says what it is told to: deterministic, without a model, for unit tests of loops, rewards and environments."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from rlhf.errors import ConfigError, EngineError, RolloutError
from rlhf.rollout.batch import FinishReason, Rollout
from rlhf.rollout.engine import Prompts, RolloutEngine, encode_prompts
from rlhf.rollout.sampling import SamplingParams, check_sampling


class FakePrompt(NamedTuple):
    """What a scripting function is told: token ids, the dataset row, and the ids decoded without special tokens."""

    ids: list[int]
    row: dict[str, Any]
    text: str


@dataclass(frozen=True)
class FakeResponse:
    """A scripted response with more than its text.

    Attributes:
        content: text, or token ids that are returned exactly as they are.
        logprobs: one for each token, the end token that is added to a text included; None for the engine's constant.
        finish_reason: in place of STOP; no end token is added then. A response that max_new_tokens cuts is LENGTH whatever stands here.
    """

    content: str | Sequence[int]
    logprobs: Sequence[float] | None = None
    finish_reason: FinishReason | str | None = None


class FakeCall(NamedTuple):
    """One entry of `FakeEngine.calls`: the method, the engine's weight version after it, and for generate its prompts and options."""

    method: str
    weight_version: int
    prompts: list[FakePrompt] | None = None
    sampling: SamplingParams | None = None


Response = str | Sequence[int] | Tensor | FakeResponse
Script = Sequence[Response] | Mapping[str, Sequence[Response] | Response] | Callable[[FakePrompt, int, int | None], Response]


class FakeEngine(RolloutEngine):
    """An engine with scripted responses and the full interface of a real one.

    Texts get the tokenizer's end token; ids are taken as they are. Like a real engine it stops after the first end token, stop token id or
    stop string and keeps it, cuts at `max_new_tokens` (finish reason LENGTH), carries `weight_version`, wakes itself to generate, and
    takes weights from `weights=` when their version differs. Temperature, top-p and the like are recorded and change nothing.

    Args:
        tokenizer: encodes and decodes; None for `CharCodec`, one id per character.
        responses: what to say.
            A list is cycled over the rows, and goes on where the last call ended.
            A dict maps a prompt's text (the row's `prompt`, the last message of a chat, or the decoded ids) to one response or a
            list, cycled for that prompt.
            A function gets (prompt: FakePrompt, sample index within the group, seed) and returns one; the seed is None or differs by row.
        logprob: the log-probability of every token that has none scripted; None for a rollout without log-probabilities.

    Attributes:
        calls: list[FakeCall], every call in order.
        asleep, closed: the engine's state.

    >>> engine = FakeEngine(responses=["4", "5"])
    >>> engine.generate("2+2=", SamplingParams(n=2)).texts
    ['4', '5']
    """

    def __init__(self, tokenizer: Any = None, responses: Script = ("ok",), *, logprob: float | None = -1.0) -> None:
        if isinstance(responses, (str, FakeResponse)):
            raise ConfigError(f"responses must be a list, a dict or a function, got {type(responses).__name__}; put one response in a list")
        if not callable(responses) and not len(responses):
            raise ConfigError("responses must hold at least one response, got none")
        self.tokenizer = CharCodec() if tokenizer is None else tokenizer
        self.weight_version = 0
        self.calls: list[FakeCall] = []
        self.asleep = False
        self.closed = False
        self._script = responses
        self._logprob = logprob
        self._spoken: dict[str | None, int] = {}  # responses handed out: per key of a dict, under None for a list
        self._lock = threading.RLock()

    def generate(self, prompts: Prompts, sampling: SamplingParams, *, weights: Any = None) -> Rollout:
        """The scripted responses for these prompts; see the class and `RolloutEngine.generate`.

        Raises:
            EngineError: the engine is closed, the script has nothing for a prompt, or a response is shorter than min_new_tokens.
        """
        check_sampling(sampling)
        with self._lock:
            self._check_open()
            encoded = encode_prompts(prompts, self.tokenizer)
            if weights is not None:
                self.sync(weights)
            if self.asleep:
                self.wake()
            known = [FakePrompt(ids.tolist(), row, self._decode(ids.tolist())) for ids, row in encoded]
            self._log("generate", known, sampling)
            tokens = [
                self._tokens(prompt, sample, None if sampling.seed is None else sampling.seed + i * sampling.n + sample, sampling)
                for i, prompt in enumerate(known)
                for sample in range(sampling.n)
            ]
            version = self.weight_version
        owners = [i for i in range(len(known)) for _ in range(sampling.n)]
        return Rollout.build(
            [encoded[i][0] for i in owners],
            [ids for ids, _, _ in tokens],
            logprobs=None if self._logprob is None else [logprobs for _, logprobs, _ in tokens],
            temperature=sampling.temperature,
            filtered=sampling.filtered,
            group=owners,
            weight_version=version,
            finish_reasons=[reason for _, _, reason in tokens],
            rows=[encoded[i][1] for i in owners],
            tokenizer=self.tokenizer,
        )

    async def agenerate(self, prompts: Prompts, sampling: SamplingParams, *, weights: Any = None) -> Rollout:
        """As `generate`, after giving other tasks a turn."""
        await asyncio.sleep(0)
        return self.generate(prompts, sampling, weights=weights)

    def update_weights(self, source: Any) -> None:
        """Take over `source.weight_version`, or count one up for a source without one."""
        with self._lock:
            self._check_open()
            version = getattr(source, "weight_version", None)
            self.weight_version = self.weight_version + 1 if version is None else int(version)
            self._log("update_weights")

    def sleep(self) -> None:
        """Note that the engine sleeps; `generate` wakes it."""
        with self._lock:
            self._check_open()
            self.asleep = True
            self._log("sleep")

    def wake(self) -> None:
        """Note that the engine is awake."""
        with self._lock:
            self._check_open()
            self.asleep = False
            self._log("wake")

    def close(self) -> None:
        """Refuse all further calls."""
        with self._lock:
            if not self.closed:
                self.closed = True
                self._log("close")

    def _check_open(self) -> None:
        if self.closed:
            raise EngineError("this FakeEngine is closed; make a new one")

    def _log(self, method: str, prompts: list[FakePrompt] | None = None, sampling: SamplingParams | None = None) -> None:
        self.calls.append(FakeCall(method, self.weight_version, prompts, sampling))

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _tokens(
        self, prompt: FakePrompt, sample: int, seed: int | None, sampling: SamplingParams
    ) -> tuple[list[int], list[float], FinishReason]:
        scripted = self._scripted(prompt, sample, seed)
        response = (
            scripted
            if isinstance(scripted, FakeResponse)
            else FakeResponse(scripted.tolist() if isinstance(scripted, Tensor) else scripted)
        )
        end = getattr(self.tokenizer, "eos_token_id", None)
        reason = FinishReason.STOP if response.finish_reason is None else FinishReason(response.finish_reason)
        if isinstance(response.content, str):
            ids = list(self.tokenizer(response.content, add_special_tokens=False)["input_ids"])
            if end is not None and response.finish_reason is None:
                ids.append(end)
        elif isinstance(response.content, Iterable):
            ids = [int(value) for value in response.content]
        else:
            raise EngineError(f"a scripted response must be text, token ids or a FakeResponse, got {type(response.content).__name__}")
        constant = 0.0 if self._logprob is None else self._logprob
        logprobs = [constant] * len(ids) if response.logprobs is None else [float(value) for value in response.logprobs]
        if len(logprobs) != len(ids):
            raise RolloutError(
                f"a scripted response must have one log-probability for each of its {len(ids)} tokens, got {len(logprobs)}; "
                "a text has one more token than it seems, the end token"
            )
        stop_at = self._stop_at(ids, {end, *sampling.stop_token_ids}, tuple(sampling.stop))
        if stop_at < len(ids):
            ids, logprobs, reason = ids[:stop_at], logprobs[:stop_at], FinishReason.STOP
        if len(ids) < sampling.min_new_tokens:
            raise EngineError(
                f"a scripted response has {len(ids)} tokens and min_new_tokens is {sampling.min_new_tokens}; script a longer one"
            )
        if len(ids) > sampling.max_new_tokens:
            ids, logprobs, reason = ids[: sampling.max_new_tokens], logprobs[: sampling.max_new_tokens], FinishReason.LENGTH
        return ids, logprobs, reason

    def _scripted(self, prompt: FakePrompt, sample: int, seed: int | None) -> Any:
        script = self._script
        if callable(script):
            return script(prompt, sample, seed)
        if not isinstance(script, Mapping):
            return script[self._next(None) % len(script)]
        names = _prompt_names(prompt)
        key = next((name for name in names if name in script), None)
        if key is None:
            raise EngineError(f"the script has no response for the prompt {names[0]!r}; it knows {', '.join(map(repr, list(script)[:5]))}")
        answers = script[key]
        if isinstance(answers, (str, FakeResponse, Tensor)) or (answers and isinstance(answers[0], int)):
            return answers
        if not answers:
            raise EngineError(f"the script has an empty list for the prompt {key!r}; give at least one response")
        return answers[self._next(key) % len(answers)]

    def _next(self, key: str | None) -> int:
        spoken = self._spoken.get(key, 0)
        self._spoken[key] = spoken + 1
        return spoken

    def _stop_at(self, ids: list[int], end_ids: set[int | None], stops: tuple[str, ...]) -> int:
        """How many ids a real engine would have sampled: up to the first end token or the token that completes a stop string."""
        for count in range(1, len(ids) + 1):
            if ids[count - 1] in end_ids:
                return count
            if stops:
                text = self._decode(ids[:count])
                if any(stop in text for stop in stops):
                    return count
        return len(ids)


def _prompt_names(prompt: FakePrompt) -> list[str]:
    """The texts by which a script may know a prompt, the likeliest first."""
    own = prompt.row.get("prompt")
    names = [own] if isinstance(own, str) else []
    if isinstance(own, (list, tuple)) and own and isinstance(own[-1], Mapping) and isinstance(own[-1].get("content"), str):
        names.append(own[-1]["content"])
    return [*names, prompt.text]


class CharCodec:
    """One id per character: a stand-in for a tokenizer where the text is all that matters.

    Id 0 is padding, 1 the end token, and a character's id is its code point + 2. Chats are written `<role>content</role>`.

    >>> CharCodec()("hi")["input_ids"]
    [106, 107]
    """

    pad_token_id = 0
    eos_token_id = 1
    bos_token_id = None
    pad_token = "<pad>"
    eos_token = "<eos>"
    all_special_tokens = ("<pad>", "<eos>")
    all_special_ids = (0, 1)
    chat_template = "<role>content</role>"

    def __call__(self, text: str | list[str], add_special_tokens: bool = True) -> dict[str, Any]:
        if isinstance(text, str):
            return {"input_ids": self.encode(text, add_special_tokens)}
        return {"input_ids": [self.encode(each, add_special_tokens) for each in text]}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; there is no prefix or suffix to add."""
        return [ord(character) + len(self.all_special_ids) for character in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False) -> str:
        """The text of ids; ids beyond Unicode become U+FFFD."""
        first = len(self.all_special_ids)
        special = ("", "") if skip_special_tokens else self.all_special_tokens
        return "".join(special[i] if i < first else chr(i - first) if i - first < 0x110000 else "\ufffd" for i in map(int, ids))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenize: bool = True,
        return_dict: bool = False,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> Any:
        """Messages as `<role>content</role>`, with an open `<assistant>` at the end on request."""
        text = "".join(f"<{message['role']}>{message['content']}</{message['role']}>" for message in messages)
        if continue_final_message:
            text = text.removesuffix(f"</{messages[-1]['role']}>")
        if add_generation_prompt:
            text += "<assistant>"
        if not tokenize:
            return text
        return {"input_ids": self.encode(text)} if return_dict else self.encode(text)
