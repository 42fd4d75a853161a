"""Which token ids end a response."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import InvalidArgument
from common.vlm.loading import text_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase, Qwen2_5_VLConfig


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, config: Qwen2_5_VLConfig, texts: Sequence[str]
) -> tuple[int, ...]:
    """The model's end-of-sequence tokens and the recipe's.

    Args:
        texts: each has to be exactly one token.
    Raises: InvalidArgument for a text that is several tokens, or none.
    """
    ids: set[int] = set()
    for configured in (tokenizer.eos_token_id, text_config(config).eos_token_id):
        if configured is not None:
            ids.update(configured if isinstance(configured, list) else [configured])
    for text in texts:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) != 1:
            raise InvalidArgument(
                f"rollout.stop has {text!r}, which is {len(tokens)} tokens of this tokenizer; "
                "legal is a text that is one token",
                text=text,
            )
        ids.add(tokens[0])
    return tuple(sorted(ids))
