"""OpenAIEngine: completions from a server that speaks OpenAI's ``/v1/completions``. For evaluation, never for training.

Prompts go out as token ids (vLLM, SGLang and others take them). Sampled ids are taken where the server gives them
(vLLM's ``token_ids``, or tokens spelt ``token_id:123``); elsewhere its text is encoded again, which keeps the text and
can change the ids, and that is why training refuses this engine. Only the standard library is used.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from sorl_algos.rollout.engine import Completion, EngineError, Sampling, StopReason

_TRY_AGAIN = frozenset({408, 409, 429, 500, 502, 503, 504})
_SPELT_ID = re.compile(r"\Atoken_id:(\d+)\Z")
_SEEDS = 2**31  # servers take signed 32-bit seeds


class ServerError(EngineError):
    """The server gave no completion."""


class _Failed(Exception):
    """One attempt came to nothing; ``wait_s`` is what the server asked for, ``final``: asking again is no use."""

    def __init__(self, reason: str, *, wait_s: float = 0.0, final: bool = False) -> None:
        super().__init__(reason)
        self.wait_s, self.final = wait_s, final


class OpenAIEngine:
    """A RolloutEngine over HTTP.

    Args:
        url: base of the API, as ``http://127.0.0.1:8000/v1``.
        model: the name under which the server knows the model.
        tokenizer: the model's own; makes ids of texts where the server gives no ids.
        key: sent as bearer token; None: none.
        send: "ids" sends prompts as token ids, "text" as texts, for servers that take nothing else.
        extras: ask for what vLLM and SGLang can do beyond OpenAI's API (stop strings kept, ids and log-probabilities
            returned). Off for servers that refuse fields they do not know.
        timeout_s: for one request. tries: requests for one completion before it is an error.
        at_once: requests under way at one time.
        sleep: waits between tries.

    The log-probabilities of its completions are the server's where it gives one for each token, otherwise zeros.
    ``retokenised`` counts completions whose ids were made from text.

    Raises:
        ValueError: a URL that is none, or numbers out of range.
    """

    def __init__(
        self,
        url: str,
        model: str,
        tokenizer: Any,
        *,
        key: str | None = None,
        send: Literal["ids", "text"] = "ids",
        extras: bool = True,
        timeout_s: float = 300.0,
        tries: int = 5,
        at_once: int = 32,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not url.startswith(("http://", "https://")) or not model:
            raise ValueError(f"a server needs a URL as http://host:port/v1 and a model name, got {url!r} and {model!r}")
        if timeout_s <= 0 or tries < 1 or at_once < 1:
            raise ValueError("timeout_s, tries and at_once of the server must be positive")
        if send not in ("ids", "text"):
            raise ValueError(f"send is {send!r}; known: ids, text")
        self.url, self.model, self.tokenizer = url.rstrip("/"), model, tokenizer
        self.send, self.extras, self.timeout_s, self.tries, self.at_once = send, extras, timeout_s, tries, at_once
        self.retokenised = 0
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._sleep = sleep

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Refused: a server's weights are its own, and its ids need not be those that were sampled."""
        raise RuntimeError("an OpenAI-compatible server is for evaluation only; train with HFEngine or VLLMEngine")

    def models(self) -> list[dict[str, Any]]:
        """What the server says of the models it serves. Raises ServerError."""
        return list(self._with_retries(lambda: self._exchange("GET", "/models", None)).get("data", []))

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        """One completion a prompt, in order; each is a request of its own.

        Raises:
            ServerError: a completion that could not be had after all tries; the others are dropped with it.
        """
        bodies = [self._body(prompt, sampling, place) for place, prompt in enumerate(prompts)]
        if not bodies:
            return []
        with ThreadPoolExecutor(min(self.at_once, len(bodies))) as pool:
            replies = list(
                pool.map(lambda body: self._with_retries(lambda: self._exchange("POST", "/completions", body)), bodies)
            )
        return [
            self._completion(reply, body, sampling.stop) for reply, body in zip(replies, bodies, strict=True)
        ]

    def _body(self, prompt: Sequence[int], sampling: Sampling, place: int) -> dict[str, Any]:
        most = min(sampling.max_tokens, sampling.budgets[place]) if sampling.budgets else sampling.max_tokens
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(prompt) if self.send == "ids" else self.tokenizer.decode(list(prompt)),
            "max_tokens": most,
            "temperature": sampling.temperature,
            "n": 1,
            "stream": False,
        }
        if sampling.top_p < 1:
            body["top_p"] = sampling.top_p
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.seeds is not None:
            body["seed"] = sampling.seeds[place] % _SEEDS
        if self.extras:
            body |= {
                "logprobs": 0,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
                "include_stop_str_in_output": True,
                "no_stop_trim": True,
                "skip_special_tokens": False,
                "add_special_tokens": False,
            }
        return body

    def _completion(self, reply: dict[str, Any], body: dict[str, Any], stop: tuple[str, ...]) -> Completion:
        try:
            choice = reply["choices"][0]
            text, finish = str(choice["text"]), choice.get("finish_reason")
        except (KeyError, IndexError, TypeError):
            raise ServerError(f"{self.url} answered with something that is no completion: {str(reply)[:200]}") from None
        logprobs = choice.get("logprobs") or {}
        ids = _sampled_ids(choice, logprobs.get("tokens"))
        told = logprobs.get("token_logprobs")
        reason: StopReason = "length" if finish == "length" else "eos"
        missing = ""
        if reason != "length":
            ending = _stop_reached(text, choice, stop)
            if ending is not None:
                reason, missing = "stop", "" if text.rstrip().endswith(ending) else ending
        if ids is None:
            self.retokenised += 1
            ids = self.tokenizer.encode(text + missing, add_special_tokens=False)
        elif missing:
            ids = [*ids, *self.tokenizer.encode(missing, add_special_tokens=False)]
        if not ids:  # an end token that the server keeps to itself
            end = self.tokenizer.eos_token_id
            if end is None:
                raise ServerError(f"{self.url} gave an empty completion, and the tokenizer names no end token")
            ids = [end]
        numbers = told if isinstance(told, list) and len(told) == len(ids) and None not in told else [0.0] * len(ids)
        return Completion(tuple(ids), tuple(max(float(one), -1e9) for one in numbers), reason, 0)

    def _with_retries(self, attempt: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        reason = ""
        for number in range(self.tries):
            try:
                return attempt()
            except _Failed as failure:
                reason = str(failure)
                if failure.final:
                    break
                if number + 1 < self.tries:
                    self._sleep(max(failure.wait_s, min(0.5 * 2.0**number, 30.0) * random.uniform(0.5, 1.5)))
        raise ServerError(
            f"{self.url} gave no completion of model {self.model!r} ({reason}); is it running, and does it serve it?"
        )

    def _exchange(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as error:
            said = " ".join(error.read(2000).decode("utf-8", "replace").split())[:300]
            hint = ""
            if error.code in (400, 422) and body is not None:
                hint = "; a server may need prompts as text (send) or refuse fields beyond OpenAI's (extras)"
            raise _Failed(
                f"status {error.code}: {said}{hint}",
                wait_s=_seconds(error.headers.get("Retry-After")),
                final=error.code not in _TRY_AGAIN,
            ) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _Failed(str(error) or type(error).__name__) from None
        if not isinstance(answer, dict):
            raise _Failed("the answer is no JSON object", final=True)
        return answer


def _sampled_ids(choice: dict[str, Any], tokens: Any) -> list[int] | None:
    """The ids that the server gives, or None."""
    given = choice.get("token_ids")
    if isinstance(given, list) and given and all(isinstance(one, int) for one in given):
        return list(given)
    if isinstance(tokens, list) and tokens:
        spelt = [_SPELT_ID.match(one) if isinstance(one, str) else None for one in tokens]
        ids = [int(found[1]) for found in spelt if found]
        return ids if len(ids) == len(tokens) else None
    return None


def _stop_reached(text: str, choice: dict[str, Any], stop: tuple[str, ...]) -> str | None:
    """The stop string at which a completion ended, or None if it ended by itself.

    A server that cuts it off may say which it was (vLLM's ``stop_reason``); of one that does not, it is the closing
    tag of the element that was left open last.
    """
    for string in stop:
        if text.rstrip().endswith(string):
            return string
    if "stop_reason" in choice:
        return choice["stop_reason"] if choice["stop_reason"] in stop else None
    left_open = []
    for string in stop:
        opened = text.rfind("<" + string[2:]) if string.startswith("</") else -1
        if opened > text.rfind(string):
            left_open.append((opened, string))
    return max(left_open)[1] if left_open else None


def _seconds(value: str | None) -> float:
    """A Retry-After header in seconds, at most a minute; 0 where it says nothing usable."""
    try:
        return min(max(float(value or 0), 0.0), 60.0)
    except ValueError:
        return 0.0
