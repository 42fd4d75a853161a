"""Names of Qwen2.5-VL's weights in checkpoints and in memory. Needs no torch.

Checkpoints say ``model.layers.*`` and ``visual.*``; the modules are called
``model.language_model.layers.*`` and ``model.visual.*``. A checkpoint that was written with the
in-memory names is read as well.
"""

from __future__ import annotations

VISUAL = "model.visual."
LANGUAGE = "model.language_model."
HEAD = "lm_head."
_DISK_VISUAL = "visual."
_DISK_LANGUAGE = "model."


def in_memory_name(disk_name: str) -> str:
    """The parameter that a checkpoint's tensor belongs to."""
    if disk_name.startswith(_DISK_VISUAL):
        return VISUAL + disk_name.removeprefix(_DISK_VISUAL)
    if disk_name.startswith((VISUAL, LANGUAGE)):
        return disk_name
    if disk_name.startswith(_DISK_LANGUAGE):
        return LANGUAGE + disk_name.removeprefix(_DISK_LANGUAGE)
    return disk_name


def on_disk_name(memory_name: str) -> str:
    """The name that a parameter has in a checkpoint."""
    if memory_name.startswith(VISUAL):
        return _DISK_VISUAL + memory_name.removeprefix(VISUAL)
    if memory_name.startswith(LANGUAGE):
        return _DISK_LANGUAGE + memory_name.removeprefix(LANGUAGE)
    return memory_name
