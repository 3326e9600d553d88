"""Engine: load a compiled model and generate with it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from os import PathLike
from typing import Any, Unpack

import torch

from dsc.runtime.artifact import EngineFolder
from dsc.runtime.backends import Backend, Runner, make_backend
from dsc.runtime.batch import Batch, BatchBuilder
from dsc.runtime.cache import LatentCache, choose_num_blocks, least_blocks
from dsc.runtime.detokenizer import Decode
from dsc.runtime.errors import DscError, nearest
from dsc.runtime.load_text import load_text
from dsc.runtime.loop import Loop
from dsc.runtime.manifest import Manifest
from dsc.runtime.model import CompiledModel
from dsc.runtime.prompts import Prompt, PromptReader
from dsc.runtime.proposer import MtpProposer
from dsc.runtime.ranks.group import Group, alone
from dsc.runtime.request import Output, Request
from dsc.runtime.sampler import Sampler
from dsc.runtime.sampling import SamplingOptions, SamplingParams, end_tokens, model_defaults
from dsc.runtime.scheduler import Scheduler
from dsc.runtime.spec import ModelSpec
from dsc.runtime.stream import Stream
from dsc.runtime.tokenizer import Tokenizer


def load(
    path: str | PathLike[str],
    device: str | None = None,
    *,
    cache_tokens: int | None = None,
    prefix_reuse: bool = True,
    verify: bool = True,
    gpu_memory: float | None = None,
) -> Engine:
    """Load an engine folder that `dsc compile` wrote.

    device        None: the engine's own target
    cache_tokens  tokens the latent cache holds; None: what the engine's limits ask for, or what fits into the memory that
                  is left (half of it on a CPU), if that is room for one sequence
    prefix_reuse  prompts that begin alike share their beginning in the cache
    verify        compare every file with its hash, beside binding; ranks of one machine share them
    gpu_memory    bytes of the GPU's memory to take in all, weights and cache; None: what is free
    raises        DscError: no engine, another version or target, files missing or changed, no room for weights and cache,
                  ranks that are missing, of another build, or cannot load

    An engine of several ranks runs in as many processes. One process that loads it starts the others on its own machine;
    on a CPU torch has no more threads in it from then on than a rank's part of the cores, unless you set them again.
    Where torchrun started them, all load it: on rank 0 this returns, on the others it serves, as rank 0's options say,
    until that engine is closed or gone, and then exits the process.
    """
    folder = EngineFolder.open(path)
    options = LoadOptions(device, cache_tokens, prefix_reuse, verify, gpu_memory)
    if folder.manifest.ranks == 1:
        return make_engine(folder, options)
    from dsc.runtime.ranks.load import load_ranks

    return load_ranks(folder, options)


@dataclass(frozen=True)
class LoadOptions:
    """What `load` is given beside the folder."""

    device: str | None = None
    cache_tokens: int | None = None
    prefix_reuse: bool = True
    verify: bool = True
    gpu_memory: float | None = None


def make_engine(
    folder: EngineFolder, options: LoadOptions, group: Group | None = None, make_loop: Callable[..., Loop] = Loop
) -> Engine:
    """The engine of one rank; `group` has the others, if there are any."""
    manifest = folder.manifest
    rank = 0 if group is None else group.rank
    place = manifest.parallel.place(rank)
    least = _least_cache_bytes(manifest, options.cache_tokens)
    share = (0, 1) if group is None else (group.local_rank, group.local_ranks)
    checking = _Checking(folder, share) if options.verify else None
    try:
        backend = make_backend(folder, options.device, options.gpu_memory, least, place=place, group=group)
        engine = Engine(folder, backend, options.cache_tokens, options.prefix_reuse, group, make_loop)
    finally:
        if checking is not None:
            checking.finish()
    folder.release_pages()  # weights are packed, or on the device
    return engine


def _least_cache_bytes(manifest: Manifest, cache_tokens: int | None) -> int:
    limits, layout = manifest.limits, manifest.kv_cache
    blocks = least_blocks(limits.sequences, limits.context_tokens, layout.block_tokens, cache_tokens)
    return blocks * layout.block_bytes * len(_cache_names(manifest))


def _cache_names(manifest: Manifest) -> list[str]:
    """One for each layer of each model."""
    return [f"cache.{layer}" for model in manifest.models.values() for layer in model.layers]


class _Checking(threading.Thread):
    """Hashes the engine's files beside other work: a share of them, where ranks of one machine have the others."""

    def __init__(self, folder: EngineFolder, share: tuple[int, int]) -> None:
        super().__init__(daemon=True)
        self._folder, self._share = folder, share
        self._fault: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._folder.verify_hashes(share=self._share)
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._fault = error

    def finish(self) -> None:
        """Wait, and raise what was found."""
        self.join()
        if self._fault is not None:
            raise self._fault


@dataclass(frozen=True)
class Draft:
    """The greedy next token of a sequence, and what the MTP layer thinks comes after it."""

    token: int
    drafts: list[int]


class Engine:
    """A loaded engine. `generate` and `stream` may be called from several threads; they share steps.

    With `close`, or as a context manager, it ends at a time of your choice.
    """

    def __init__(
        self,
        folder: EngineFolder,
        backend: Backend,
        cache_tokens: int | None = None,
        prefix_reuse: bool = True,
        group: Group | None = None,
        make_loop: Callable[..., Loop] = Loop,
    ) -> None:
        self._folder = folder
        self.backend = backend
        self.agree_least: Callable[[int], int] = alone if group is None else group.agree_least
        manifest = self.manifest
        manifest.check_models(str(folder.path))
        programs = {name: backend.program(name) for name in manifest.graphs}
        self.programs: Mapping[str, Runner] = programs
        self.models = {
            name: CompiledModel(name, {phase: programs[graph] for phase, graph in model.phases.items()})
            for name, model in manifest.models.items()
            if "decode" in model.phases
        }
        # Nothing below may hold the engine itself: a deleted engine gives its memory back at once.
        self._tokenizer = cache(partial(Tokenizer, folder.tokenizer_dir))
        generation_config = self._read_generation_config()
        self.defaults = model_defaults(generation_config)
        self.cache = self._make_cache(cache_tokens)
        for model in self.models.values():
            model.set_caches(self.cache.tensors)
        self.ahead = backend.run_ahead(self.programs)
        self._loop = self._make_loop(prefix_reuse, make_loop)
        self._prompts = PromptReader(
            tokenizer_dir=folder.tokenizer_dir,
            tokenizer=self._tokenizer,
            defaults=self.defaults,
            ends=end_tokens(generation_config, self.spec.eos_token_ids),
            vocab_size=self.spec.vocab_size,
            context_tokens=manifest.limits.context_tokens,
            cache_tokens=self.cache.capacity_tokens,
            max_drafts=self.max_drafts,
        )

    # -- what it is

    @property
    def manifest(self) -> Manifest:
        """Everything the engine says about itself."""
        return self._folder.manifest

    @property
    def spec(self) -> ModelSpec:
        """What the model is, in numbers."""
        return self.manifest.spec

    @property
    def report(self) -> dict[str, Any]:
        """What the compiler fused, declined and quantized, and why."""
        return self._folder.report

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back, and the chat template. Raises DscError if the engine has none."""
        return self._tokenizer()

    @property
    def max_drafts(self) -> int:
        """Tokens the MTP layer drafts by default, and at most; 0 without MTP."""
        return self.manifest.mtp.drafts if "mtp" in self.models else 0

    @property
    def acceptance(self) -> tuple[int, int]:
        """Tokens drafted since loading, and how many of them the model accepted."""
        return self._loop.drafted, self._loop.accepted

    def load_text(self) -> str:
        """What loading came to, in one line: bytes and rate where weights were copied, tokens the cache holds."""
        return load_text(self.backend.describe(), self.cache.capacity_tokens)

    @property
    def executed(self) -> dict[str, tuple[str, ...]]:
        """Names of the nodes each graph ran in its last step; () if it has not run."""
        return {name: program.executed for name, program in self.programs.items()}

    def resident_weight_bytes(self) -> int:
        """Bytes of all weights kept in memory: packed for this machine, or mapped as stored."""
        return self.backend.resident_weight_bytes()

    # -- generate

    def sampling(self, **options: Unpack[SamplingOptions]) -> SamplingParams:
        """The model's default sampling parameters with some changed, checked. Raises DscError with all faults."""
        params = self.defaults.with_options(options)
        params.check(self.spec.vocab_size, self.max_drafts)
        return params

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> list[Output]:
        """Continue prompts, all together in as few steps as the limits allow.

        prompts  each a text, a list of token ids, or a conversation (dicts with role and content) through the chat template
        params   for all prompts (a seed too), or one per prompt; None: the model's defaults. `options` change them by name
        returns  outputs in the order of the prompts
        raises   DscError before any work, naming each prompt that cannot be served
        """
        requests = self._prompts.requests(prompts, params, options)
        for request in requests:
            self._loop.submit(request)
        try:
            for request in requests:
                while not request.finished:
                    self._loop.drive(request)
        except BaseException:
            self._leave(requests)
            raise
        return [request.output() for request in requests]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[SamplingOptions]
    ) -> Stream:
        """Continue one prompt; iterate over the result for the text as it comes. Raises DscError as `generate` does."""
        (request,) = self._prompts.requests([prompt], params, options, streamed=True)
        if request.decode is None:
            raise DscError("the engine has no tokenizer, so there is no text to stream", try_="generate, for token ids")
        return Stream(self._loop, request)

    def draft(self, prompts: Sequence[Prompt], drafts: int | None = None) -> list[Draft]:
        """What the MTP layer drafts after each prompt and the greedy token that follows it.

        For looking at drafts; not while other threads generate, since their steps would check the drafts at once.
        """
        count = self.max_drafts if drafts is None else drafts
        if not self.max_drafts:
            raise DscError("the engine has no MTP model that drafts", wanted="mtp: {enabled: true, drafts: 1}")
        params = SamplingParams(temperature=0.0, drafts=count, max_tokens=count + 2, ignore_eos=True)
        requests = self._prompts.requests(prompts, params, {})
        for request in requests:
            self._loop.submit(request)
        found = []
        try:
            for request in requests:
                while request.num_generated == 0 and not request.finished:
                    self._loop.drive(request)
                found.append(Draft(request.tokens[len(request.prompt)], list(request.drafts)))
        finally:
            self._leave(requests)
        return found

    def forward(self, batch: Batch, model: str = "main", phase: str = "") -> torch.Tensor:
        """One ragged step for those who bring their own scheduler: logits float32 [R, V], rows as `batch.logit_rows`.

        Take blocks from `engine.cache.pool` and give them back; `Batch.of` builds batches.

        model   "main", or "mtp" with `batch.hidden`
        phase   "prefill" or "decode"; "": by the longest query
        """
        return self.forward_with_hidden(batch, model, phase)[0]

    def forward_with_hidden(
        self, batch: Batch, model: str = "main", phase: str = ""
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward`, with the hidden rows [T, D] that mtp takes: after the model's last norm."""
        if model not in self.models:
            known = ", ".join(self.models)
            raise DscError(f"the engine has no model {model}", wanted=known, try_=nearest(model, self.models))
        return self._loop.run(self.models[model], batch, phase)

    # -- the end

    def close(self) -> None:
        """Serve nobody any more, and end the processes of the other ranks. Memory comes back when the engine is deleted.

        A deleted engine, and one left behind by its process, ends them too.
        """
        self._loop.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside

    @property
    def loop(self) -> Loop:
        """What serves the requests of all threads."""
        return self._loop

    @property
    def decode(self) -> Decode | None:
        """Token ids to text; None where the engine has no tokenizer."""
        return self._prompts.decode

    def _leave(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._loop.cancel(request)
        self._loop.settle()

    def _read_generation_config(self) -> dict[str, Any]:
        path = self._folder.tokenizer_dir / "generation_config.json"
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}

    def _make_cache(self, cache_tokens: int | None) -> LatentCache:
        limits, layout = self.manifest.limits, self.manifest.kv_cache
        names = _cache_names(self.manifest)
        blocks = choose_num_blocks(
            limits.sequences,
            limits.context_tokens,
            layout.block_tokens,
            layout.block_bytes * len(names),
            self.backend.cache_bytes(),
            cache_tokens,
            weight_bytes=self.resident_weight_bytes(),
            may_swap=self.backend.device.type == "cpu",
            where=str(self._folder.path),
        )
        sizes = dict.fromkeys(names, layout.block_bytes)
        return LatentCache.allocate(sizes, layout.block_tokens, self.agree_least(blocks), self.backend.device)

    def _make_loop(self, prefix_reuse: bool, make_loop: Callable[..., Loop]) -> Loop:
        limits, block_tokens = self.manifest.limits, self.manifest.kv_cache.block_tokens
        proposer = None
        if self.max_drafts:
            proposer = MtpProposer(self.models["mtp"], limits.batch_tokens, limits.sequences, block_tokens)
        return make_loop(
            main=self.models["main"],
            sampler=Sampler(self.programs["sample"], self.spec.vocab_size, limits.batch_tokens),
            proposer=proposer,
            cache=self.cache,
            scheduler=Scheduler(self.cache.pool, block_tokens, limits.batch_tokens, limits.sequences, prefix_reuse),
            builder=BatchBuilder(limits.batch_tokens, limits.sequences, block_tokens),
            ahead=self.ahead,
        )
