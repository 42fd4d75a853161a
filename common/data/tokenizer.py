"""Trains the byte-level BPE tokenizer of a small model, with the special tokens of Qwen2.5-VL.

Any text can be encoded, because all 256 bytes are tokens. Every decimal digit is one token of its
own, so that a one-digit answer is one sampled token.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from common.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterable

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
VISION_START = "<|vision_start|>"
VISION_END = "<|vision_end|>"
IMAGE_PAD = "<|image_pad|>"
VIDEO_PAD = "<|video_pad|>"

SPECIAL_TOKENS: tuple[str, ...] = (
    END_OF_TEXT,
    TURN_START,
    TURN_END,
    VISION_START,
    VISION_END,
    IMAGE_PAD,
    VIDEO_PAD,
)
"""The last tokens of the vocabulary, in this order."""

CHAT_TEMPLATE = """\
{%- macro render(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- else -%}
    {%- for part in content -%}
      {%- if part.type == 'image' -%}
        {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
      {%- elif part.type == 'video' -%}
        {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
      {%- elif part.type == 'text' -%}
        {{- part.text -}}
      {%- else -%}
        {{- raise_exception('content part of unknown type ' ~ part.type) -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
  {{- '<|im_start|>' ~ message.role ~ '\\n' ~ render(message.content) ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
"""Turns in the ChatML form; one placeholder token for each image and each video."""

_BYTES = 256
_CHAT_WORDS = "system\nuser\nassistant\n"


def train_tokenizer(
    texts: Iterable[str], *, vocab_tokens: int, fill_to_tokens: int | None = None
) -> PreTrainedTokenizerFast:
    """Learn merges from ``texts``.

    Args:
        texts: what the prompts and answers of the task look like.
        vocab_tokens: upper limit of the whole vocabulary, bytes and special tokens included. Fewer
            result where the texts do not have that many pairs.
        fill_to_tokens: add tokens that no text leads to, before the special ones, until there are
            this many of all; they decode to texts of their own. None: add none.
    Raises: InvalidArgument if the limit does not even hold the bytes and special tokens.
    """
    smallest = _BYTES + len(SPECIAL_TOKENS)
    if vocab_tokens < smallest:
        raise InvalidArgument(
            f"tokenizer.vocab_tokens is {vocab_tokens}; byte-level BPE needs at least {smallest}",
            key="tokenizer.vocab_tokens",
            value=vocab_tokens,
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_tokens - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CHAT_WORDS, *texts], trainer)
    if fill_to_tokens is not None:
        tokenizer = _filled(tokenizer, fill_to_tokens - len(SPECIAL_TOKENS))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[t for t in SPECIAL_TOKENS if t not in (TURN_END, END_OF_TEXT)],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1 << 20,
    )


def _filled(tokenizer: Tokenizer, tokens: int) -> Tokenizer:
    """The tokenizer with entries in its vocabulary that no merge makes."""
    content = json.loads(tokenizer.to_str())
    first = tokenizer.get_vocab_size()
    content["model"]["vocab"] |= {f"[filler-{i}]": i for i in range(first, tokens)}
    return Tokenizer.from_str(json.dumps(content))
