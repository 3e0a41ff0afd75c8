"""Responses of the endpoint in the format of OpenAI's chat completions."""

import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from verl.names import POLICY_MODEL
from verl.utils.sampling import StopReason

MODEL_NAME = POLICY_MODEL  # model name that clients send; the same for every policy


class RequestRefused(Exception):
    """Refusal of a request.

    ``status`` is the HTTP status, ``param`` the invalid key, and ``code`` OpenAI's error code if
    there is one.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code

    def build_error_body(self) -> dict[str, Any]:
        """Return the JSON body of the error."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        fields = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}


@dataclass(frozen=True, slots=True)
class Reply:
    """One sampled turn in the form that a client receives."""

    text: str
    stop_reason: StopReason
    prompt_tokens: int
    sampled_tokens: int
    model: str = MODEL_NAME

    def build_completion_body(self) -> dict[str, Any]:
        """Return the JSON body of the chat completion."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": self.text},
            "finish_reason": self.stop_reason.value,
            "logprobs": None,
        }
        usage = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.sampled_tokens,
            "total_tokens": self.prompt_tokens + self.sampled_tokens,
        }
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": [choice],
            "usage": usage,
        }


def build_model_list(names: Iterable[str]) -> dict[str, Any]:
    """Return the JSON body of the list of models."""
    model = {"object": "model", "created": 0, "owned_by": "rlvcr"}
    return {"object": "list", "data": [{"id": name, **model} for name in names]}
