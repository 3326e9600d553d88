"""What `dsc passes` and `dsc plugins` print: read from the passes and schemas themselves, so never out of date."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields

from dsc.compiler.ir.rewrite import find_pass, pass_names
from dsc.plugins.schema import Op, Tensor, Weight, folder_of, load_op, plugin_folders
from dsc.runtime.errors import DscError, nearest


def pass_lines() -> list[str]:
    """One line a pass: its name, its options with defaults, what it does."""
    return [f"{_pass_head(name)}\n    {_first_paragraph(inspect.getmodule(find_pass(name)))}" for name in pass_names()]


def pass_manual(name: str) -> str:
    """A pass's options, what it rewrites and what it leaves. Raises DscError with the nearest known name."""
    return f"{_pass_head(name)}\n\n{inspect.getdoc(find_pass(name))}"


def _pass_head(name: str) -> str:
    options = ", ".join(
        f.name if f.default is MISSING and f.default_factory is MISSING else f"{f.name}={_default(f)}"
        for f in fields(find_pass(name))
    )
    return f"{name}({options})" if options else name


def _default(field: object) -> str:
    default = getattr(field, "default", MISSING)
    return str(default) if default is not MISSING else "..."


def _first_paragraph(documented: object) -> str:
    return (inspect.getdoc(documented) or "").split("\n\n")[0].replace("\n", " ")


def _op_of_folder(folder: str) -> Op:
    return load_op("".join(part.capitalize() for part in folder.split("_")))


def plugin_lines() -> list[str]:
    """One line an op: its name and operands."""
    lines = []
    for folder in plugin_folders():
        op = _op_of_folder(folder)
        inputs = ", ".join(t.name + ("?" if t.optional else "") for t in op.inputs)
        lines.append(f"{op.name}({inputs}) -> {', '.join(t.name + ('?' if t.when else '') for t in op.outputs)}")
    return lines


def plugin_manual(name: str) -> str:
    """An op's operands with dimensions and dtypes, its attributes and its meaning."""
    folders = plugin_folders()
    if folder_of(name) not in folders:
        known = [_op_of_folder(folder).name for folder in folders]
        raise DscError(f"no plugin op {name}", wanted=", ".join(known), try_=nearest(name, known))
    op = _op_of_folder(folder_of(name))
    lines = [op.name, ""]
    lines += ["inputs", *(_operand(t) for t in op.inputs), "outputs", *(_operand(t) for t in op.outputs)]
    if op.attributes or op.optional:
        lines += ["attributes", *(f"  {name}: {type_.__name__}" for name, type_ in op.attribute_types().items())]
        lines += [f"  {name}: {_values(wanted)}, optional" for name, wanted in op.optional.items()]
    return "\n".join([*lines, "", op.doc]).rstrip()


def _values(wanted: tuple[str, ...] | type) -> str:
    return wanted.__name__ if isinstance(wanted, type) else " or ".join(wanted)


def _operand(tensor: Tensor) -> str:
    kind = "weight in any format" if isinstance(tensor, Weight) else tensor.like and f"as {tensor.like}"
    kind = kind or " or ".join(tensor.dtypes)
    when = f"with {tensor.when}" if tensor.when else ""
    notes = [kind, "optional" if tensor.optional else when, f"is {tensor.alias}" if tensor.alias else ""]
    return f"  {tensor.name:<18} [{', '.join(tensor.dims.split())}]  {', '.join(n for n in notes if n)}"
