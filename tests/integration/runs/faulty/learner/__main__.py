from __future__ import annotations

import sys

from services.learner.__main__ import main

sys.exit(main())
