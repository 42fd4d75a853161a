"""`rollplex verify`: the split pass and the schedules, held against what they must equal."""

from rollplex.verify.report import VerifyReport, verify

__all__ = ["VerifyReport", "verify"]
