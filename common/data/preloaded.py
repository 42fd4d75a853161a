"""What the forkserver of data workers imports, for all of them; nothing else imports it."""

from __future__ import annotations

import gc

from common.service.parent_watch import die_with_starter

# Until its imports are done, it does not look whether the process that started it is still there.
die_with_starter()
gc.disable()

import common.data.preflight  # noqa: E402
import common.data.processor  # noqa: E402, F401

# Shared with every process that is forked: no collection has to look at it.
gc.freeze()
gc.enable()
