"""Actors: one mailbox, one message at a time, background tasks that end in one message each."""

from common.actor.actor import Actor, ActorState, TaskCancelled, TaskEnded
from common.actor.machine import InvalidTransition, StateCell, Story, TransitionTable
from common.actor.mailbox import Mailbox, MailboxClosed, MailboxFull

__all__ = [
    "Actor",
    "ActorState",
    "InvalidTransition",
    "Mailbox",
    "MailboxClosed",
    "MailboxFull",
    "StateCell",
    "Story",
    "TaskCancelled",
    "TaskEnded",
    "TransitionTable",
]
