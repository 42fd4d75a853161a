"""The order in which the groups of a step are admitted: the step's own, whatever comes first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.rollout.engines.errors import EngineStateInvalid, GroupRequestInvalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.ids import GroupId
    from services.rollout.engines.protocol import GroupRequest


class AdmissionOrder:
    """Groups of a step; each is expected, ready, admitted or dropped."""

    def __init__(self, groups: Sequence[GroupId]) -> None:
        if len(set(groups)) != len(groups):
            raise GroupRequestInvalid(f"groups of the step {list(groups)}: each only once")
        self._groups = tuple(groups)
        self._known = frozenset(groups)
        self._ready: dict[GroupId, GroupRequest] = {}
        self._dropped: set[GroupId] = set()
        self._position = 0

    @property
    def next_group(self) -> GroupId | None:
        """The group to be admitted next; None if all are admitted or dropped."""
        for group in self._groups[self._position :]:
            if group not in self._dropped:
                return group
        return None

    @property
    def next_is_ready(self) -> bool:
        """Whether there is a next group and its request has come."""
        return self.next_group in self._ready

    def add(self, request: GroupRequest) -> None:
        """Note that a group is ready; one that was dropped stays so, as the two may cross.

        Raises: GroupRequestInvalid for a group that the step does not have; EngineStateInvalid for
            one that was added or admitted before.
        """
        self._require_known(request.group)
        if request.group in self._dropped:
            return
        if request.group in self._ready or self._was_admitted(request.group):
            raise EngineStateInvalid(f"group {request.group} was added already")
        self._ready[request.group] = request

    def drop(self, group: GroupId) -> None:
        """Note that a group is not wanted any more, wherever it is. Idempotent.

        Raises: GroupRequestInvalid for a group that the step does not have.
        """
        self._require_known(group)
        self._ready.pop(group, None)
        self._dropped.add(group)

    def take_next(self) -> GroupRequest:
        """Remove the next group, which must be ready."""
        group = self.next_group
        assert group is not None
        self._position = self._groups.index(group, self._position) + 1
        return self._ready.pop(group)

    def _was_admitted(self, group: GroupId) -> bool:
        return group in self._groups[: self._position]

    def _require_known(self, group: GroupId) -> None:
        if group not in self._known:
            raise GroupRequestInvalid(
                f"group {group} is not in the step: must be one of {list(self._groups)}"
            )
