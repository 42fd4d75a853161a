from __future__ import annotations

from common.ids import Service
from tests.integration.service.tiny import main

raise SystemExit(main(Service.REFERENCE))
