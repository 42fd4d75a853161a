from __future__ import annotations

import sys

from services.reference.__main__ import main

sys.exit(main())
