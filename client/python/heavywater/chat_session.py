"""Asks a model turn by turn; what is shown is for others to say."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from heavywater.chat_turns import Held, hold
from heavywater.client import Client
from heavywater.conversation import Conversation
from heavywater.errors import HeavywaterError
from heavywater.generation import Generation, Token
from heavywater.model import Model
from heavywater.v1 import common_pb2

# What a sequence that cannot go on is refused with: the conversation can be asked as a whole.
_COMPUTE_ANEW = ("FAILED_PRECONDITION", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED")


@dataclass(frozen=True)
class Sampling:
    """As Client.generate takes it."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError: before the first question, not at it."""
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"the temperature is {self.temperature}, want a number of 0 or more")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, want a number from 0 to 1")


@dataclass
class ChatSession:
    """One conversation with one model. A turn goes on with the sequence of the last answer where that holds most of
    the conversation; else it sends all of it, as a sequence of its own. The last one stays open, so that its sets
    can be seen."""

    client: Client
    model: Model
    policy: common_pb2.PolicyOptions
    max_new_tokens: int
    sampling: Sampling = Sampling()
    conversation: Conversation = field(default_factory=Conversation)
    last: Generation | None = None  # of the last answer
    held: Held | None = None  # by its sequence, to go on with

    def check(self) -> None:
        """Raises HeavywaterError where the servers would refuse every question, for its policy or otherwise."""
        with self._generate("a", 1) as generation:
            generation.wait_accepted()
            self.last = generation
        self.forget_sequence()

    def ask(self, question: str, show: Callable[[Token], None]) -> bool:
        """Adds a turn, showing each token of the answer. False: it was interrupted (KeyboardInterrupt), and
        the answer is what had come. Raises HeavywaterError and ValueError: the turn is then taken back."""
        self.conversation.ask(question)
        try:
            text, whole = self._answer(show)
        except BaseException:
            self.conversation.take_back()
            raise
        self.conversation.answer(text)
        return whole

    def forget_sequence(self) -> None:
        """Closes the sequence of the last answer."""
        if self.last is not None and self.last.sequence_id and self.client.has_cache:
            with contextlib.suppress(HeavywaterError):  # its lease may have ended it
                self.client.close(self.last.sequence_id)
        self.last = self.held = None

    def _answer(self, show: Callable[[Token], None]) -> tuple[str, bool]:
        prompt = self.model.chat(self.conversation.messages)
        tokens: list[Token] = []
        with self._begin(prompt) as generation:
            self.last = generation
            try:
                for token in generation:
                    tokens.append(token)
                    show(token)
            except KeyboardInterrupt:
                return "".join(token.text for token in tokens), False
        answer = "".join(token.text for token in tokens)
        if tokens:
            self.held = hold(self.client, generation, prompt + answer, tokens[-1])
        return answer, True

    def _begin(self, prompt: str) -> Generation:
        held, self.held = self.held, None
        rest = held.rest_of(prompt, self.model.encode) if held else ""
        if held and rest:
            generation = self._generate(held.tokens, self.max_new_tokens, rest, held.sequence_id)
            try:
                generation.wait_accepted()
                return generation
            except HeavywaterError as error:
                generation.cancel()
                if error.code not in _COMPUTE_ANEW:
                    raise
        self.forget_sequence()
        return self._generate(prompt, self.max_new_tokens)

    def _generate(
        self, prompt: str | list[int], max_new_tokens: int, suffix: str = "", continues: int = 0
    ) -> Generation:
        return self.client.generate(
            prompt,
            suffix=suffix,
            continues=continues,
            max_new_tokens=max_new_tokens,
            policy=self.policy,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            seed=self.sampling.seed,
        )
