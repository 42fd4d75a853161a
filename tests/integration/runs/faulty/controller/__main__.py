from __future__ import annotations

import sys

from services.controller.__main__ import main

sys.exit(main())
