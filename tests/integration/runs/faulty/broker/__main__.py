from __future__ import annotations

import sys

from services.broker.__main__ import main

sys.exit(main())
