"""What the parts of the importer share: named nodes with typed results, and weights as expressions of stored tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_graphsurgeon as gs

from dsc.compiler.ir.graph import Graph, constant, variable, weight
from dsc.compiler.ir.weight import Cast, Dequantize, DequantizePacked, Expression, Source
from dsc.compiler.packing import LAYOUTS, parts_of
from dsc.plugins.schema import Dim, Type
from dsc.runtime.errors import DscError
from dsc.runtime.spec import ModelSpec, Packing

SourceLookup = Callable[[str], Source]  # a stored tensor's dtype and shape by its name, or KeyError; reads no data


class Builder:
    """Adds nodes to one graph. A node's single result is named as the node; all results are float32 unless said.

    faults  stored tensors of the wrong shape, collected so that all are told at once
    """

    def __init__(self, graph: Graph, spec: ModelSpec, source: SourceLookup) -> None:
        self.graph, self.spec, self.source = graph, spec, source
        self.faults: list[DscError] = []
        self._constants: dict[str, gs.Constant] = {}

    # -- nodes

    def op(
        self,
        op: str,
        name: str,
        inputs: Sequence[gs.Variable | gs.Constant],
        shape: Sequence[Dim],
        dtype: str = "float32",
        **attributes: Any,
    ) -> gs.Variable:
        """A node with one result of the given shape."""
        result = variable(name, Type(dtype, tuple(shape)))
        self.graph.add(op, inputs, [result], name, **attributes)
        return result

    def split(self, name: str, x: gs.Variable, axis: int, **widths: int) -> list[gs.Variable]:
        """Cut an axis into parts of the given widths, called `{name}.{part}`."""
        results = []
        for part, width in widths.items():
            shape = list(x.shape)
            shape[axis] = width
            results.append(variable(f"{name}.{part}", Type("float32", tuple(shape))))
        self.graph.add("Split", [x, self.ints(*widths.values())], results, name, axis=axis)
        return results

    def reshape(self, name: str, x: gs.Variable, shape: Sequence[Dim]) -> gs.Variable:
        """A view; the one symbolic size becomes -1."""
        return self.op("Reshape", name, [x, self.ints(*(d if isinstance(d, int) else -1 for d in shape))], shape)

    def linear(self, name: str, x: gs.Variable, w: gs.Constant) -> gs.Variable:
        """x W^T for W [N, K] as stored."""
        return self.op("Gemm", name, [x, w], (x.shape[0], w.shape[0]), transB=1)

    def norm(self, name: str, x: gs.Variable, tensor: str, epsilon: float = 0.0) -> gs.Variable:
        """RMSNorm over the last axis; the model's epsilon unless another is given."""
        scale = self.exact(tensor, (x.shape[-1],))
        epsilon = epsilon or self.spec.rms_norm_eps
        return self.op("RMSNormalization", name, [x, scale], x.shape, axis=-1, epsilon=epsilon)

    def swiglu(self, name: str, gate: gs.Variable, up: gs.Variable) -> gs.Variable:
        """silu(gate) * up."""
        sigmoid = self.op("Sigmoid", f"{name}.sigmoid", [gate], gate.shape)
        silu = self.op("Mul", f"{name}.silu", [gate, sigmoid], gate.shape)
        return self.op("Mul", name, [silu, up], gate.shape)

    def one_hot(self, name: str, ids: gs.Variable, depth: int) -> gs.Variable:
        """ids [T, K] -> [T, K, depth], 1 at the id and 0 elsewhere."""
        off_on = self._constants.setdefault("off_on", constant("off_on", [0, 1], "float32"))
        return self.op("OneHot", name, [ids, self.ints(depth), off_on], (*ids.shape, depth), axis=-1)

    # -- constants

    def ints(self, *values: int) -> gs.Constant:
        """A small int64 vector (a shape, axes, a count); one constant per value."""
        name = f"ints.{','.join(map(str, values))}"
        return self._constants.setdefault(name, constant(name, values, "int64"))

    def number(self, value: float) -> gs.Constant:
        """A float32 scalar; one constant per value."""
        name = f"number.{value!r}"
        return self._constants.setdefault(name, constant(name, value, "float32"))

    def weight(self, tensor: str, shape: tuple[int, ...], weight_class: str) -> gs.Constant:
        """A linear weight of the checkpoint, named as there; one constant however many read it."""
        return self.make_weight(tensor, lambda: self.matrix(tensor, shape), weight_class)

    def exact(self, tensor: str, shape: tuple[int, ...]) -> gs.Constant:
        """A tensor of the checkpoint that keeps float32 in every engine (norms, router)."""
        return self.make_weight(tensor, lambda: self.vector(tensor, shape), "exact")

    def make_weight(self, name: str, make: Callable[[], Expression], weight_class: str) -> gs.Constant:
        """The weight constant of a name, made on first use."""
        if name not in self._constants:
            self._constants[name] = weight(name, make(), weight_class)
        return self._constants[name]

    def matrix(self, tensor: str, shape: tuple[int, ...]) -> Expression:
        """A stored matrix as float32: fp8 or packed codes times their scales, anything else converted."""
        packing = self.spec.source.packing
        if packing is not None and not self._is_stored(tensor):
            return self._packed(tensor.removesuffix(".weight"), shape, packing)
        source = self.stored(tensor, shape)
        if source.dtype != "float8_e4m3fn":
            return Cast(source, "float32")
        block = self.spec.source.block
        scales = self.stored(f"{tensor}_scale_inv", tuple(-(-n // b) for n, b in zip(shape, block, strict=True)))
        return Dequantize(source, scales, block)

    def _packed(self, module: str, shape: tuple[int, ...], packing: Packing) -> DequantizePacked:
        """A matrix of which only packed codes are stored."""
        layout, parts = LAYOUTS[packing.method], parts_of(packing, *shape)
        words, scales = (self.stored(f"{module}.{end}", parts[end].shape) for end in (layout.words, layout.scales))
        zeros = self.stored(f"{module}.{layout.zeros}", parts[layout.zeros].shape) if packing.zeros else None
        return DequantizePacked(words, scales, zeros, packing, shape)

    def _is_stored(self, tensor: str) -> bool:
        try:
            self.source(tensor)
        except KeyError:
            return False
        return True

    def vector(self, tensor: str, shape: tuple[int, ...]) -> Expression:
        """A stored tensor that is never quantized, as float32."""
        source = self.stored(tensor, shape)
        return source if source.dtype == "float32" else Cast(source, "float32")

    def stored(self, tensor: str, shape: tuple[int, ...]) -> Source:
        """A stored tensor; another shape than the model's numbers say is a fault, kept for the end."""
        source = self.source(tensor)
        if source.shape == shape:
            return source
        wanted, got = (str(Type(source.dtype, s)) for s in (shape, source.shape))
        self.faults.append(DscError(f"{tensor} does not fit config.json", wanted=wanted, got=got))
        return Source(tensor, source.dtype, shape)
