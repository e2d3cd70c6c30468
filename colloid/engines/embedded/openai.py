"""The OpenAI-shaped endpoints, as far as a rollout needs them: models, completions, chat completions."""

from collections.abc import Callable
from typing import Any

from aiohttp import web

from colloid.engines.contract import BadRequest, GenerateInput, SamplingParams
from colloid.engines.embedded.request import FinishReason
from colloid.engines.embedded.server import EngineServer, Generation, Snapshot, json_response, read_json, stream_events

# OpenAI's names of what SamplingParams takes; SGLang's own names are taken as they are.
PARAMETER_NAMES = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "seed": "sampling_seed"}
SAME_NAMES = (
    *("temperature", "top_p", "top_k", "min_p", "stop", "n", "stop_token_ids", "ignore_eos", "skip_special_tokens"),
    *("no_stop_trim", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"),
)
UNSUPPORTED = ("tools", "functions", "response_format", "suffix", "best_of", "echo", "top_logprobs")


class OpenAIRoutes:
    def __init__(self, server: EngineServer):
        self.server = server

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chat_completions)

    async def models(self, request: web.Request) -> web.Response:
        info = self.server.info
        card = {
            "id": info.served_model_name,
            "object": "model",
            "owned_by": "colloid",
            "root": info.model_path,
            "max_model_len": info.context_length,
        }
        return json_response({"object": "list", "data": [card]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = _body(await read_json(request))
        prompt = body.get("prompt")
        params = _params(body)
        with_log_probs = body.get("logprobs") not in (None, False, 0)
        if isinstance(prompt, str) and prompt:
            inputs = GenerateInput(None, prompt, params, None, with_log_probs)
        elif isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            inputs = GenerateInput(tuple(prompt), None, params, None, with_log_probs)
        else:
            raise BadRequest("prompt must be a string that is not empty, or a list of token ids")

        def choice(generation: Generation, index: int, text: str, reason: str | None) -> dict[str, Any]:
            sequence = generation.sequences[index]
            log_probs = {"token_logprobs": sequence.log_probs, "tokens": sequence.output_ids}
            shown = log_probs if with_log_probs and reason else None
            return {"index": index, "text": text, "logprobs": shown, "finish_reason": reason}

        return await self._answer(request, inputs, body, ("cmpl", "text_completion", "text_completion"), choice, choice)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        body = _body(await read_json(request))
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise BadRequest("messages must be a list of objects that is not empty")
        ids = self.server.text.apply_chat_template(messages)
        with_log_probs = bool(body.get("logprobs"))
        inputs = GenerateInput(ids, None, _params(body), None, with_log_probs)

        def choice(generation: Generation, index: int, text: str, reason: str | None) -> dict[str, Any]:
            sequence = generation.sequences[index]
            pairs = zip(sequence.output_ids, sequence.log_probs, strict=True)
            content = [{"token": self.server.text.tokenizer.decode([t]), "logprob": p} for t, p in pairs]
            message = {"role": "assistant", "content": text}
            log_probs = {"content": content} if with_log_probs else None
            return {"index": index, "message": message, "logprobs": log_probs, "finish_reason": reason}

        def delta(generation: Generation, index: int, text: str, reason: str | None) -> dict[str, Any]:
            return {"index": index, "delta": {"role": "assistant", "content": text}, "finish_reason": reason}

        kinds = ("chatcmpl", "chat.completion", "chat.completion.chunk")
        return await self._answer(request, inputs, body, kinds, choice, delta)

    async def _answer(
        self,
        request: web.Request,
        inputs: GenerateInput,
        body: dict[str, Any],
        kinds: tuple[str, str, str],
        choice: Callable[..., dict[str, Any]],
        chunk: Callable[..., dict[str, Any]],
    ) -> web.StreamResponse:
        stream = body.get("stream") is True
        generation = await self.server.start([inputs], stream)
        prefix, whole_kind, chunk_kind = kinds
        head = {
            "id": f"{prefix}-{generation.sequences[0].rid}",
            "created": int(generation.started),
            "model": body.get("model") or self.server.info.served_model_name,
        }
        sent = [""] * len(generation.sequences)

        def event(index: int, snapshot: Snapshot) -> dict[str, Any]:
            """Only what is new since the sample's last event; half a character waits for its other half."""
            text = self.server.text.decode(generation.sequences[index], snapshot.length)
            if not snapshot.finish_reason:
                text = text.rstrip("\ufffd")
            new, sent[index] = text[len(sent[index]) :], text
            one = chunk(generation, index, new, _reason(snapshot.finish_reason))
            return {**head, "object": chunk_kind, "choices": [one]}

        try:
            if stream:
                return await stream_events(request, generation, event)
            await generation.finished()
        except BaseException:
            generation.cancel()
            raise
        choices = [
            choice(generation, i, self.server.text.decode(sequence), _reason(sequence.finish_reason))
            for i, sequence in enumerate(generation.sequences)
        ]
        prompt_tokens = len(generation.sequences[0].prompt_ids)
        completion_tokens = sum(len(sequence.output_ids) for sequence in generation.sequences)
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
        return json_response({**head, "object": whole_kind, "choices": choices, "usage": usage})


def _body(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise BadRequest("the request must be a JSON object")
    for name in UNSUPPORTED:
        if body.get(name):
            raise BadRequest(f"{name} is not supported by the embedded engine; leave it out")
    return body


def _params(body: dict[str, Any]) -> SamplingParams:
    given = {name: body[name] for name in SAME_NAMES if body.get(name) is not None}
    given |= {ours: body[name] for name, ours in PARAMETER_NAMES.items() if body.get(name) is not None}
    return SamplingParams.from_json(given)


def _reason(reason: FinishReason | None) -> str | None:
    return reason.type if reason else None
