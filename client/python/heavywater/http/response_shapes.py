"""The objects of /v1/responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from heavywater.http.answer import Piece
from heavywater.http.shapes import Shape

_COMPLETED, _INCOMPLETE, _RUNNING = "completed", "incomplete", "in_progress"


@dataclass
class ResponseShape(Shape):
    """Of one answer: an output item with one text."""

    _number: int = 0  # of the next event
    _pieces: list[Piece] = field(default_factory=list)

    def whole(self, pieces: Sequence[Piece]) -> dict[str, object]:
        last = pieces[-1]
        status = _INCOMPLETE if last.finish_reason == "length" else _COMPLETED
        text = "".join(piece.text for piece in pieces)
        return self._response(status, [self._item(status, [_part(text)])]) | {
            "incomplete_details": {"reason": "max_output_tokens"} if status == _INCOMPLETE else None,
            "usage": self._usage(pieces),
            "heavywater": last.figures,
        }

    def opening(self) -> list[dict[str, object]]:
        begun = self._response(_RUNNING, [])
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event("response.output_item.added", output_index=0, item=self._item(_RUNNING, [])),
            self._event("response.content_part.added", **self._place(), part=_part("")),
        ]

    def chunks(self, piece: Piece) -> list[dict[str, object]]:
        self._pieces.append(piece)
        events = []
        if piece.text:
            events.append(self._event("response.output_text.delta", **self._place(), delta=piece.text, logprobs=[]))
        if piece.finish_reason is None:
            return events
        whole = self.whole(self._pieces)
        text = "".join(one.text for one in self._pieces)
        return [
            *events,
            self._event("response.output_text.done", **self._place(), text=text, logprobs=[]),
            self._event("response.content_part.done", **self._place(), part=_part(text)),
            self._event(
                "response.output_item.done", output_index=0, item=self._item(str(whole["status"]), [_part(text)])
            ),
            self._event(f"response.{whole['status']}", response=whole),
        ]

    @property
    def farewell(self) -> str:
        return ""

    def _event(self, kind: str, **values: object) -> dict[str, object]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **values}

    def _place(self) -> dict[str, object]:
        return {"item_id": f"msg_{self.id}", "output_index": 0, "content_index": 0}

    def _item(self, status: str, content: list[dict[str, object]]) -> dict[str, object]:
        return {"id": f"msg_{self.id}", "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, status: str, output: list[dict[str, object]]) -> dict[str, object]:
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created_s,
            "status": status,
            "model": self.model,
            "output": output,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": False,
            "temperature": self.asked.temperature,
            "top_p": self.asked.top_p,
            "max_output_tokens": self.asked.max_tokens,
            "tool_choice": "none",
            "tools": [],
            "usage": None,
        }

    def _usage(self, pieces: Sequence[Piece]) -> dict[str, object]:
        usage = self.usage(pieces)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }


def _part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
