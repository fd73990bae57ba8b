"""Asks a model turn by turn; what is shown is for others to say."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from heavywater.client import Client
from heavywater.conversation import Conversation
from heavywater.errors import HeavywaterError
from heavywater.generation import Generation, Token
from heavywater.model import Model
from heavywater.v1 import common_pb2


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
    """One conversation with one model. Each turn sends the whole conversation, as a sequence of its own; the
    sequence of the last answer stays open, so that its sets can be seen."""

    client: Client
    model: Model
    policy: common_pb2.PolicyOptions
    max_new_tokens: int
    sampling: Sampling = Sampling()
    conversation: Conversation = field(default_factory=Conversation)
    last: Generation | None = None  # of the last answer

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
        self.last = None

    def _answer(self, show: Callable[[Token], None]) -> tuple[str, bool]:
        prompt = self.model.chat(self.conversation.messages)
        self.forget_sequence()
        texts: list[str] = []
        with self._generate(prompt, self.max_new_tokens) as generation:
            self.last = generation
            try:
                for token in generation:
                    texts.append(token.text)
                    show(token)
            except KeyboardInterrupt:
                return "".join(texts), False
        return "".join(texts), True

    def _generate(self, prompt: str, max_new_tokens: int) -> Generation:
        return self.client.generate(
            prompt,
            max_new_tokens=max_new_tokens,
            policy=self.policy,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            seed=self.sampling.seed,
        )
