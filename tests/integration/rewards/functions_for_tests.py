"""Reward functions that behave well and badly; run in worker processes."""

from __future__ import annotations

import math
import os
import time


def length(completion, row):
    return len(completion) / row.get("scale", 1)


def exact(completion, row):
    return completion == row["answer"]


def raises(completion, row):
    if completion == "bad":
        raise ValueError("cannot parse this")
    return 1.0


def sleeps(completion, row):
    if completion == "bad":
        time.sleep(600)
    return 1.0


def gives_nan(completion, row):
    return math.nan if completion == "bad" else 1


def gives_text(completion, row):
    return "1.0" if completion == "bad" else 1.0


def exits(completion, row):
    if completion == "bad":
        raise SystemExit(4)
    return 1.0


def ends_its_process(completion, row):
    if completion == "bad":
        time.sleep(0.3)
        os._exit(9)
    return 1.0


def spins_and_says_who(completion, row):
    with open(row["pid_file"], "a") as file:
        file.write(f"{os.getpid()}\n")
    while True:
        pass


def takes_one(completion):
    return 1.0


async def is_async(completion, row):
    return 1.0


def changes_its_row(completion, row):
    row["seen"].append(completion)
    return float(len(row["seen"]))


def takes_a_while(completion, row):
    time.sleep(0.0 if completion == "quick" else 0.15)
    return 1.0


def gives_too_much(completion, row):
    return 10**400 if completion == "bad" else 1


class Unspeakable(Exception):
    def __str__(self):
        raise TypeError


def raises_the_unspeakable(completion, row):
    if completion == "bad":
        raise Unspeakable
    return 1.0
