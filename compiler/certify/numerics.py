"""Run an engine and the unquantized model side by side, a segment at a time, and measure how far apart they are.

Legend: T tokens of all windows, in their order; R rows of logits, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from dsc.compiler.certify.device import PHASE
from dsc.compiler.certify.measures import Predictions, compare_rows
from dsc.compiler.certify.reference import bind_reference
from dsc.compiler.certify.runners import Bind, Runner, Values
from dsc.compiler.certify.segments import Segment
from dsc.compiler.certify.steps import Windows, make_steps
from dsc.compiler.checkpoint import Checkpoint
from dsc.compiler.emit import gather
from dsc.compiler.graphs import make_graphs
from dsc.compiler.lower import lower
from dsc.compiler.recipe import KvCache, Recipe
from dsc.runtime.artifact import EngineFolder
from dsc.runtime.certificate import Acceptance, EndToEnd, LayerErrors
from dsc.runtime.errors import DscError
from dsc.runtime.manifest import Parallel
from dsc.runtime.program import Program

ROWS = 128  # of logits in memory at once
UNQUANTIZED = ("set_dtype", "quantize_weights", "quantize_norms")  # the passes that the reference leaves out


@dataclass(frozen=True)
class Numerics:
    """What was measured."""

    layers: tuple[LayerErrors, ...]
    end_to_end: EndToEnd
    mtp: Acceptance | None


def measure(
    folder: EngineFolder,
    recipe: Recipe,
    checkpoint: Checkpoint,
    windows: Windows,
    device: torch.device,
    engine: Bind,
) -> Numerics:
    """Feed the same windows to engine and reference and compare them after every layer and at the end.

    device  where the reference is computed; `engine` binds the engine's segments: see `certify.device`
    """
    reference = _reference_programs(recipe, checkpoint, device)
    main = _Pair(folder, engine, reference, "main", windows)
    hidden = main.run({}, {})
    end_to_end, chosen = main.predict(hidden)
    if "mtp" not in folder.manifest.models:
        return Numerics(main.layers, end_to_end, None)
    kept = _but_last(windows)
    mtp = _Pair(folder, engine, reference, "mtp", [window[1:] for window in windows])
    drafts = mtp.choose(mtp.run(*({"hidden": rows[kept]} for rows in hidden)))
    # Row i of MTP, fed with the token after i, drafts what main chooses at row i + 1.
    agreed = [float((draft == choice[kept + 1]).double().mean()) for draft, choice in zip(drafts, chosen, strict=True)]
    acceptance = Acceptance(len(kept), *agreed)
    return Numerics((*main.layers, *mtp.layers), end_to_end, acceptance)


class _Pair:
    """A model of the engine and of the reference, run side by side."""

    def __init__(
        self,
        folder: EngineFolder,
        engine: Bind,
        reference: Mapping[str, tuple[Program, Bind]],
        model: str,
        windows: Windows,
    ) -> None:
        self.model, self.windows = model, windows
        self.layers: tuple[LayerErrors, ...] = ()
        block = folder.manifest.kv_cache.block_tokens
        program = folder.program(folder.manifest.models[model].phases[PHASE])
        limits = program.letters
        self._engine = Runner(program, make_steps(windows, block, limits["T"], limits["B"]), engine)
        self._reference = Runner(reference[model][0], make_steps(windows, block), reference[model][1])
        self._pairs = list(zip(self._engine.segments, self._reference.segments, strict=True))
        for ours, theirs in self._pairs:
            if (ours.layer, ours.carried, ours.gives) != (theirs.layer, theirs.carried, theirs.gives):
                raise _other_graph(folder, ours, theirs)
        assert self._pairs[-1][0].is_head, self._pairs[-1][0].program.name

    def run(self, engine: Values, reference: Values) -> tuple[torch.Tensor, torch.Tensor]:
        """All segments but the head; the hidden rows [T, D] of both. Fills `layers`."""
        ours, theirs = dict(engine), dict(reference)
        layers = []
        for number, (segment, other) in enumerate(self._pairs[:-1]):
            (theirs_next,) = self._reference.run(other, theirs)
            if segment.layer is None:
                (ours_next,) = self._engine.run(segment, ours)
            else:
                ours_next, alone = self._engine.run(segment, ours, theirs)
                want = _stream(segment, theirs_next)
                reached = compare_rows(_stream(segment, ours_next), want)
                layers.append(
                    LayerErrors(self.model, segment.layer, reached, compare_rows(_stream(segment, alone), want))
                )
            needed = {name for later, _ in self._pairs[number + 1 :] for name in later.carried}
            ours, theirs = (
                {name: rows for name, rows in {**before, **after}.items() if name in needed}
                for before, after in ((ours, ours_next), (theirs, theirs_next))
            )
        self.layers = tuple(layers)
        (hidden,) = self._pairs[-1][0].carried
        return ours[hidden], theirs[hidden]

    def predict(self, hidden: tuple[torch.Tensor, torch.Tensor]) -> tuple[EndToEnd, tuple[torch.Tensor, torch.Tensor]]:
        """How the predictions of all rows compare, and the likeliest token of each row of both."""
        targets = torch.tensor([token for window in self.windows for token in (*window[1:], -1)])
        predictions, chosen = Predictions(), []
        for at, got, want in self._logits(hidden):
            rows = targets[at] >= 0
            predictions.add(got[rows], want[rows], targets[at][rows])
            chosen.append((got.argmax(-1), want.argmax(-1)))
        ours, theirs = (torch.cat(tokens) for tokens in zip(*chosen, strict=True))
        return predictions.result(), (ours, theirs)

    def choose(self, hidden: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest token of each row of both."""
        pairs = [(got.argmax(-1), want.argmax(-1)) for _, got, want in self._logits(hidden)]
        ours, theirs = (torch.cat(tokens) for tokens in zip(*pairs, strict=True))
        return ours, theirs

    def _logits(self, hidden: tuple[torch.Tensor, torch.Tensor]) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Some rows after the other: where they lie, the engine's logits, the reference's."""
        segment, other = self._pairs[-1]
        ours, theirs = self._engine.head(segment, ROWS), self._reference.head(other, ROWS)
        for start in range(0, len(hidden[0]), ROWS):
            at = slice(start, start + ROWS)
            yield at, ours(hidden[0][at]), theirs(hidden[1][at])


def _stream(segment: Segment, values: Values) -> torch.Tensor:
    """The residual stream after a layer [T, D]: what its last op gives and what it is added to by the next norm."""
    return torch.stack([values[name].float() for name in segment.gives]).sum(0)


def _other_graph(folder: EngineFolder, ours: Segment, theirs: Segment) -> DscError:
    return DscError(
        f"{ours.program.name} is not cut as this version cuts the recipe's graph",
        where=str(folder.path),
        wanted=", ".join((*theirs.carried, *theirs.gives)),
        got=", ".join((*ours.carried, *ours.gives)),
        try_="the dsc that built the engine, or build it again",
    )


def _but_last(windows: Windows) -> torch.Tensor:
    """Rows of all windows but the last of each."""
    ends = set(torch.tensor([len(window) for window in windows]).cumsum(0).sub(1).tolist())
    return torch.tensor([row for row in range(sum(map(len, windows))) if row not in ends])


def _reference_programs(
    recipe: Recipe, checkpoint: Checkpoint, device: torch.device
) -> dict[str, tuple[Program, Bind]]:
    """Each model's prefill program in float32 with the checkpoint's values, and what binds its segments."""
    graphs, _ = make_graphs(unquantized(recipe), checkpoint)
    found = {}
    for graph in graphs:
        if graph.info.phase == PHASE:
            bind = bind_reference(gather([graph]), checkpoint.read, device)
            found[graph.info.model] = (lower(graph, onnx_sha256=""), bind)
    return found


def unquantized(recipe: Recipe) -> Recipe:
    """The same fusions on the CPU, on one rank, in float32, with every weight as the checkpoint has it."""
    return replace(
        recipe,
        target="cpu",
        parallel=Parallel(1, 1, 1),
        kv_cache=KvCache("float32", recipe.kv_cache.block_tokens),
        passes=tuple(entry for entry in recipe.passes if entry.name not in UNQUANTIZED),
        allow={name: entry for name, entry in recipe.allow.items() if name not in UNQUANTIZED},
    )
