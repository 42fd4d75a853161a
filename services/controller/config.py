"""How the controller deals with failures and how often it looks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from common.config.base import FrozenConfig
from common.config.loading import load_config

if TYPE_CHECKING:
    from common.config.deployment import Deployment

CONFIG_FILE = "controller.toml"
"""In the deployment's `state_dir`; absent: the defaults."""


class FailurePolicy(FrozenConfig):
    """Deadlines, and how often a run is begun again."""

    services_deadline_s: float = Field(default=120.0, gt=0)
    """Until every service is registered and SERVING; the run fails after it."""
    configure_deadline_s: float = Field(default=300.0, gt=0)
    """Until every worker has loaded its part of the run."""
    checkpoint_deadline_s: float = Field(default=600.0, gt=0)
    """Until a checkpoint is committed."""
    abort_deadline_s: float = Field(default=10.0, gt=0)
    """Until the broker has ended a failed epoch; the run goes on without it then."""
    release_deadline_s: float = Field(default=10.0, gt=0)
    """Until a worker has given up a run that ended."""
    max_restarts_in_a_row: int = Field(default=5, ge=0)
    """Failed attempts without a committed step between them; one more and the run fails."""
    backoff_s: float = Field(default=0.2, ge=0)
    """Wait before the second attempt; doubles with each failed one."""
    backoff_cap_s: float = Field(default=5.0, ge=0)
    """Longest wait between two attempts."""


class ControllerConfig(FrozenConfig):
    """Everything about the controller that is not in the deployment."""

    failures: FailurePolicy = FailurePolicy()
    """Deadlines and restarts."""
    status_interval_s: float = Field(default=0.5, gt=0)
    """Between two looks at what the workers are doing."""
    status_deadline_s: float = Field(default=0.4, gt=0)
    """Time for one such look."""
    gather_interval_s: float = Field(default=0.2, gt=0)
    """Between two looks for missing services."""
    preflight_deadline_s: float = Field(default=120.0, gt=0)
    """Time for checking data and rewards before a run is accepted."""


def load_controller_config(deployment: Deployment) -> ControllerConfig:
    """Read `controller.toml` of the deployment's `state_dir`, if there is one.

    Raises:
        ConfigError: a wrong value in it.
    """
    path = deployment.state_dir / CONFIG_FILE
    return load_config(ControllerConfig, path if path.exists() else None)
