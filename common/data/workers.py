"""Processes that read, tokenize and process samples, and a cache of what they made.

Each worker is a pool of one process, so a death tells which sample was in work, and no other sample
pays for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.data.errors import SampleError, SampleFault
from common.data.forkserver import forkserver
from common.errors import FailedPrecondition, Unavailable
from common.service.parent_watch import die_with_parent

if TYPE_CHECKING:
    from types import TracebackType

    from common.config.recipe import DataConfig
    from common.data.dataset import Dataset
    from common.data.prepared import PreparedSample
    from common.data.processor import PromptProcessor

DEFAULT_CACHE_BYTES = 256 << 20
SAMPLE_TIME_LIMIT_S = 120.0
"""A worker that needs longer for one sample is ended and counts as dead."""

_ATTEMPTS = 2
_log = logging.getLogger(__name__)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSource:
    """All that a worker has to know.

    Attributes:
        model_path: folder with tokenizer and image processor.
        splits: source of each split (``train``, ``eval``) as in the recipe.
        max_prompt_tokens: see `PromptLimits`, as for the two below.
        bfloat16_pixels: see `PreparedSample.rounded_to_bfloat16`.
    """

    model_path: str
    splits: Mapping[str, str]
    max_prompt_tokens: int
    min_pixels: int | None = None
    max_pixels: int | None = None
    bfloat16_pixels: bool = False

    @classmethod
    def from_config(
        cls, model_path: str, data: DataConfig, *, bfloat16_pixels: bool = False
    ) -> SampleSource:
        """What the recipe says."""
        splits = {"train": data.train} | ({"eval": data.eval} if data.eval is not None else {})
        return cls(
            model_path=model_path,
            splits=splits,
            max_prompt_tokens=data.max_prompt_tokens,
            min_pixels=data.min_pixels,
            max_pixels=data.max_pixels,
            bfloat16_pixels=bfloat16_pixels,
        )


class SampleReader:
    """Reads and prepares samples in this process."""

    def __init__(self, source: SampleSource) -> None:
        """Load the processor. Raises: ModelFilesError, UnsupportedModel."""
        from common.data.processor import PromptLimits, PromptProcessor

        self._source = source
        self._datasets: dict[str, Dataset] = {}
        limits = PromptLimits(
            max_prompt_tokens=source.max_prompt_tokens,
            min_pixels=source.min_pixels,
            max_pixels=source.max_pixels,
        )
        self.processor: PromptProcessor = PromptProcessor(source.model_path, limits)

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits that the source has."""
        return tuple(self._source.splits)

    def dataset(self, split: str) -> Dataset:
        """The rows of a split, opened once. Raises: InvalidArgument."""
        from common.data.dataset import open_dataset

        if split not in self._datasets:
            self._datasets[split] = open_dataset(self._source.splits[split], key=f"data.{split}")
        return self._datasets[split]

    def prepare(self, split: str, index: int) -> PreparedSample:
        """Raises: SampleError; InvalidArgument if the data set itself cannot be opened."""
        sample = sample_name(split, index)
        dataset = self.dataset(split)
        try:
            row = dataset[index]
        except Exception as error:
            raise SampleError(
                SampleFault.UNREADABLE_ROW,
                sample,
                f"the data set raised {type(error).__name__}: {error}",
            ) from error
        if not isinstance(row, Mapping):
            raise SampleError(
                SampleFault.UNREADABLE_ROW, sample, f"the row is a {type(row).__name__}, no mapping"
            )
        prepared = self.processor.prepare(row, sample=sample)
        return prepared.rounded_to_bfloat16() if self._source.bfloat16_pixels else prepared


class SamplePool:
    """Prepares samples in worker processes.

    At most one sample a worker is in work; further callers wait their turn. Used by one event loop,
    as an asynchronous context manager or with `start` and `close`.
    """

    def __init__(
        self,
        source: SampleSource,
        *,
        workers: int = 1,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        time_limit_s: float = SAMPLE_TIME_LIMIT_S,
    ) -> None:
        """Nothing is started yet.

        Args:
            source: what the workers read.
            workers: number of processes.
            cache_bytes: prepared samples that are kept in this process, least recently used out
                first; 0: none.
            time_limit_s: longest time for one sample.
        """
        self._source = source
        self._count = workers
        self._time_limit_s = time_limit_s
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._all: list[_Worker] = []
        self._cache = _SampleCache(cache_bytes)
        self.deaths = 0
        """Workers that died or were ended for being late, and were replaced."""

    async def start(self) -> None:
        """Start the workers and wait until all have loaded the processor and opened the data.

        Raises: what the processor or the data set raised, such as ModelFilesError; Unavailable if
            a worker died. None is left running then.
        """
        if self._all:
            return
        self._all = [_Worker(self._source) for _ in range(self._count)]
        try:
            await asyncio.gather(*(worker.ready() for worker in self._all))
        except BrokenProcessPool as error:
            await self.close()
            raise Unavailable("a data worker died while it was starting") from error
        except BaseException:
            await self.close()
            raise
        for worker in self._all:
            self._idle.put_nowait(worker)

    async def prepare(self, split: str, index: int) -> PreparedSample:
        """One sample; a cached one is the same object again.

        Raises: SampleError; InvalidArgument if the data set cannot be opened.
        """
        if not self._all:
            raise FailedPrecondition("the sample pool has not been started, or is closed")
        key = (split, index)
        if (cached := self._cache.get(key)) is not None:
            return cached
        worker = await self._idle.get()
        try:
            prepared = await self._attempt(worker, split, index)
        finally:
            self._idle.put_nowait(worker)
        self._cache.put(key, prepared)
        return prepared

    async def close(self) -> None:
        """End the workers. Idempotent."""
        workers, self._all = self._all, []
        for worker in workers:
            worker.kill()

    async def __aenter__(self) -> SamplePool:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _attempt(self, worker: _Worker, split: str, index: int) -> PreparedSample:
        for _ in range(_ATTEMPTS):
            try:
                async with asyncio.timeout(self._time_limit_s):
                    return await worker.prepare(split, index)
            except (BrokenProcessPool, TimeoutError):
                self.deaths += 1
                _log.warning("data worker replaced at sample %s", sample_name(split, index))
                worker.replace()
        sample = sample_name(split, index)
        raise SampleError(
            SampleFault.WORKER_DIED,
            sample,
            f"its data worker died or took over {self._time_limit_s:g} s, {_ATTEMPTS} times",
            attempts=_ATTEMPTS,
        )


class _Worker:
    """One process, and its successors."""

    def __init__(self, source: SampleSource) -> None:
        self._source = source
        self._executor = self._open()

    def _open(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            max_workers=1,
            mp_context=forkserver(),
            initializer=_set_up,
            initargs=(self._source,),
        )

    async def ready(self) -> None:
        # The first start of a process waits until the forkserver has imported everything.
        started = await asyncio.to_thread(self._executor.submit, _warm_up)
        await asyncio.wrap_future(started)

    async def prepare(self, split: str, index: int) -> PreparedSample:
        return await asyncio.wrap_future(self._executor.submit(_prepare, split, index))

    def replace(self) -> None:
        self.kill()
        self._executor = self._open()

    def kill(self) -> None:
        """End the process without waiting for what it does."""
        processes = list((self._executor._processes or {}).values())
        self._executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)


class _SampleCache:
    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._samples: OrderedDict[tuple[str, int], PreparedSample] = OrderedDict()

    def get(self, key: tuple[str, int]) -> PreparedSample | None:
        if (sample := self._samples.get(key)) is not None:
            self._samples.move_to_end(key)
        return sample

    def put(self, key: tuple[str, int], sample: PreparedSample) -> None:
        if key in self._samples or sample.size_bytes > self._limit_bytes:
            return
        self._samples[key] = sample
        self._used_bytes += sample.size_bytes
        while self._used_bytes > self._limit_bytes:
            _, oldest = self._samples.popitem(last=False)
            self._used_bytes -= oldest.size_bytes


def sample_name(split: str, index: int) -> str:
    """How errors, logs and events name a sample: ``train[17]``."""
    return f"{split}[{index}]"


_source: SampleSource | None = None
_reader: SampleReader | None = None


def _set_up(source: SampleSource) -> None:
    """First call in a worker."""
    global _source
    die_with_parent()
    for name in _THREAD_VARIABLES:
        os.environ[name] = "false" if name == "TOKENIZERS_PARALLELISM" else "1"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service decides when its workers end
    _source = source


def _warm_up() -> None:
    reader = _load()
    for split in reader.splits:
        reader.dataset(split)


def _load() -> SampleReader:
    global _reader
    if _reader is None:
        import torch

        torch.set_num_threads(1)
        assert _source is not None
        _reader = SampleReader(_source)
    return _reader


def _prepare(split: str, index: int) -> PreparedSample:
    return _load().prepare(split, index)
