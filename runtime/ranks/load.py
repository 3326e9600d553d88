"""Load an engine of several ranks: the leader's part, which gives the engine, and the others', which serve it."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from functools import partial

import torch
import torch.distributed as dist

from dsc.plugins.communicator import Communicator
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.engine import Engine, LoadOptions, make_engine
from dsc.runtime.errors import DscError
from dsc.runtime.ranks.communicator import GlooCommunicator
from dsc.runtime.ranks.followers import Followers, failure_text
from dsc.runtime.ranks.following import Following, Leader
from dsc.runtime.ranks.group import Ends, Group
from dsc.runtime.ranks.launch import Launch, find_launch
from dsc.runtime.ranks.loop import LeadingLoop, RankLoop
from dsc.runtime.ranks.meeting import Build, Door, home_store, knock, torchrun_store
from dsc.runtime.ranks.pool import LedPool
from dsc.runtime.ranks.processes import Children


def load_ranks(folder: EngineFolder, options: LoadOptions) -> Engine:
    """The engine, on rank 0. Other processes of a torchrun serve here until it is closed, and then exit.

    Outside of torchrun the other ranks are processes of this machine, started here; they end with the engine.
    Raises DscError naming ranks that did not come, that are of another build, or that failed to load.
    """
    launch, ranks = find_launch(), folder.manifest.ranks
    if launch is None:
        return _lead_children(folder, options)
    if launch.ranks != ranks:
        raise DscError(
            "the engine is for another number of ranks than were started",
            where=str(folder.path),
            wanted=f"{ranks} processes: torchrun with --nproc-per-node and --nnodes that make {ranks}, or none at all",
            got=f"{launch.ranks} processes",
        )
    store = torchrun_store(launch, str(folder.path))
    if launch.rank == 0:
        return _lead(folder, options, launch, store, None)
    follow(folder, launch, store)
    raise SystemExit(0)


def _lead_children(folder: EngineFolder, options: LoadOptions) -> Engine:
    ranks, store = folder.manifest.ranks, home_store()
    if folder.manifest.target == "cpu":
        share_cores(ranks)
    children = Children(str(folder.path), ranks, store.port)
    return _lead(folder, options, Launch(0, ranks, 0, ranks), store, children)


def share_cores(ranks: int) -> None:
    """Lower torch's number of threads, which every rank takes over, until all ranks of this machine together have no more
    than it has cores: threads that wait for others of their rank keep those of the other ranks from running."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if torch.get_num_threads() * ranks > cores:
        torch.set_num_threads(max(1, cores // ranks))


def _lead(
    folder: EngineFolder, options: LoadOptions, launch: Launch, store: dist.Store, children: Children | None
) -> Engine:
    where = str(folder.path)
    words = {"options": asdict(options), "threads": torch.get_num_threads()}
    try:
        alive = children.check if children is not None else lambda: None
        channels = Door(store, launch).welcome(Build.of(folder), words, where, alive)
    except BaseException:
        if children is not None:
            children.kill()
            children.wait()
        raise
    ends = Ends()
    address = next(iter(channels.values())).address
    followers = Followers(channels, children, ends, where)
    try:
        group = Group(
            0, launch.ranks, launch.local_rank, address, store, followers.agree_least, launch.local_ranks, ends
        )
        engine = make_engine(folder, options, group, partial(LeadingLoop, followers))
        loop = engine.loop
        assert isinstance(loop, LeadingLoop)
        loop.communicator = _communicator(engine, group)
        engine.cache = replace(engine.cache, pool=LedPool(engine.cache.pool, loop))
        followers.answers("ready")
    except BaseException as error:
        followers.refuse(error)
        raise
    return engine


def follow(folder: EngineFolder, launch: Launch, store: dist.Store) -> None:
    """Be a rank other than 0 until the engine is closed. The process ends where the leader is gone.

    Raises DscError where the leader does not come or refuses, and what went wrong on this rank, of which it tells the leader.
    """
    channel, words = knock(store, launch, Build.of(folder), str(folder.path))
    leader = Leader(channel, launch.rank)
    group = Group(
        launch.rank, launch.ranks, launch.local_rank, channel.address, store, leader.agree_least, launch.local_ranks
    )
    try:
        options = LoadOptions(**words["options"])
        if folder.manifest.target == "cpu":
            torch.set_num_threads(words["threads"])
        engine = make_engine(folder, options, group, RankLoop)
        loop = engine.loop
        assert isinstance(loop, RankLoop)
        loop.communicator = _communicator(engine, group)
        leader.tell("ready")
        Following(launch.rank, engine, loop, leader).serve()
    except BaseException as error:
        leader.tell("failed", {"text": failure_text(error)})
        raise
    finally:
        group.end()
        leader.close()


def _communicator(engine: Engine, group: Group) -> Communicator | None:
    """By which ops on a CPU reach the other ranks; None on GPUs. Waits until all have come here."""
    if engine.backend.device.type != "cpu":
        return None
    group.agree_least(1)  # nobody waits in gloo, whose patience is short, for a rank that still loads or has failed
    found = GlooCommunicator(group)
    group.on_end(found.close)
    return found
