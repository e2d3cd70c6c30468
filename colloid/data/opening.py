"""The training data that the options name: in memory or streamed, one file, several, or a mixture; and its format."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from colloid.config.prompt_files import parse_prompt_files
from colloid.config.served_models import engine_context_length
from colloid.config.sft import takes_conversations
from colloid.data.mixture import Mixture, Shuffled
from colloid.data.prompts import PromptFormat, PromptProcessor, load_prompts, load_tokenizer
from colloid.data.reading import LoadOptions, make_pool
from colloid.data.rows import PromptDataset
from colloid.data.sft import ConversationProcessor, end_token_ids, load_conversations
from colloid.data.stream import PromptStream


def load_dataset(args: Any) -> PromptDataset | PromptStream | Mixture:
    """The training prompts that `args` name; conversations, where these are what is trained.

    Raises:
        DataError: a file is missing, a row cannot be used, or none is left.
    """
    weights = args.prompt_data_weights
    if args.streaming_data:
        return _streamed(args, weights)
    files = parse_prompt_files(args.prompt_data)
    if weights is None:
        return _in_memory(args, files)
    seed, shuffle = args.rollout_seed, args.rollout_shuffle
    sources = [Shuffled(_in_memory(args, [file]), seed=seed, shuffle=shuffle) for file in files]
    return Mixture(sources, weights, seed=seed)


def _in_memory(args: Any, files: list) -> PromptDataset:
    tokenizer, options = load_tokenizer(args.hf_checkpoint), LoadOptions(args.skip_bad_rows, args.num_data_workers)
    if takes_conversations(args):
        end_ids = end_token_ids(args.hf_checkpoint, args.hf_config)
        return load_conversations(files, tokenizer, conversation_format(args), end_ids, options)
    return load_prompts(files, tokenizer, prompt_format(args), options)


def _streamed(args: Any, weights: list[float] | None) -> PromptStream | Mixture:
    tokenizer = load_tokenizer(args.hf_checkpoint)
    if takes_conversations(args):
        end_ids = end_token_ids(args.hf_checkpoint, args.hf_config)
        processor: Any = ConversationProcessor(tokenizer, conversation_format(args), end_ids)
    else:
        processor = PromptProcessor(tokenizer, prompt_format(args))
    pool = make_pool(processor, args.num_data_workers)
    options = {
        "seed": args.rollout_seed,
        "shuffle": args.rollout_shuffle,
        "window": args.streaming_window,
        "skip_bad_rows": args.skip_bad_rows,
    }
    files = parse_prompt_files(args.prompt_data)
    if weights is None:
        stream: PromptStream | Mixture = PromptStream(files, processor, pool, **options)
    else:
        parts = [PromptStream([file], processor, pool, **options) for file in files]
        stream = Mixture(parts, weights, seed=args.rollout_seed)
    stream.head()
    return stream


def prompt_format(args) -> PromptFormat:
    """The format of training prompts."""
    return PromptFormat(
        input_key=args.input_key,
        label_key=args.label_key,
        require_label="label_key" in args.given,
        metadata_key=args.metadata_key,
        tool_key=args.tool_key,
        apply_chat_template=args.apply_chat_template,
        chat_template_kwargs=args.apply_chat_template_kwargs or {},
        max_tokens=max_prompt_tokens(args),
    )


def conversation_format(args) -> PromptFormat:
    """The format of conversations to train on."""
    return replace(prompt_format(args), max_tokens=context_length(args))


def max_prompt_tokens(args) -> int | None:
    """The longest prompt that is used: `--rollout-max-prompt-len`, or what the context leaves beside the response."""
    limits = [args.rollout_max_prompt_len] if args.rollout_max_prompt_len else []
    context = context_length(args)
    if context:
        room = context - args.rollout_max_response_len
        limits.append(room if room > 0 else context - 1)
    return min(limits, default=None)


def context_length(args) -> int | None:
    """Tokens of prompt and response together: the smallest of what options and model say."""
    config = args.hf_config or {}
    model = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    given = [args.rollout_max_context_len, engine_context_length(args), model]
    return min((int(value) for value in given if value), default=None)
